//! Chat templates: Jinja as Hugging Face renders it (their block trimming, filters and functions), with limits on work,
//! and with the user's text in the result pointed out (`marks`).

use crate::marks::{self, is_word, Source};
use crate::methods::{self, Raised};
use crate::{answer, guard_library, text, Buf, Failure, Range};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

/// One unit is one instruction, or 64 bytes of text made: far above any honest template (a conversation of a thousand
/// turns takes about 200 000), and a hostile one ends within a second or two.
const FUEL: u64 = 10_000_000;
const NAME: &str = "chat template";

pub struct Template {
    env: Environment<'static>,
    /// bos_token and the like: variables that are always there.
    fixed: Map<String, Json>,
}

pub struct Rendered {
    pub text: String,
    pub user: Vec<Range>,
}

impl Template {
    pub fn compile(source: &str, fixed: &str) -> Result<Template, Failure> {
        if source.contains([marks::OPEN, marks::CLOSE]) {
            return Err("the chat template holds a noncharacter (U+FDD0 or U+FDD1)".into());
        }
        let mut env = Environment::new();
        env.set_fuel(Some(FUEL));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| e.to_string())?);
        methods::install(&mut env);
        let source = generation_as_with(source);
        jinja(|| env.add_template_owned(NAME, source.clone()))?.map_err(|e| describe(&e, Some(&source)))?;
        let fixed = object(fixed, "the template's variables")?;
        Ok(Template { env, fixed })
    }

    pub fn render(
        &self,
        messages: &str,
        tools: &str,
        extra: &str,
        add_generation_prompt: bool,
    ) -> Result<Rendered, Failure> {
        let mut messages: Json = parse(messages, "the messages")?;
        for message in messages.as_array_mut().ok_or("the messages are not a list")? {
            tidy(message.as_object_mut().ok_or("a message is not an object")?);
        }
        let tools: Json = if tools.is_empty() { Json::Null } else { parse(tools, "the tools")? };
        let extra = object(extra, "the template variables")?;

        let variables = |marker: &mut dyn FnMut(&str) -> String| -> Value {
            let mut all: Vec<(String, Value)> = vec![("documents".into(), Value::from(()))];
            all.extend(
                self.fixed.iter().map(|(key, json)| (key.clone(), value(json, Source::Protocol, &mut str::to_string))),
            );
            all.extend(extra.iter().map(|(key, json)| (key.clone(), value(json, Source::Protocol, marker))));
            all.push(("messages".into(), value(&messages, Source::Protocol, marker)));
            all.push(("tools".into(), value(&tools, Source::Protocol, marker)));
            all.push(("add_generation_prompt".into(), Value::from(add_generation_prompt)));
            Value::from_pairs(all)
        };
        let template = self.env.get_template(NAME).map_err(|e| describe(&e, None))?;
        let mut strings = vec![];
        let plain_variables = variables(&mut |text| {
            strings.push(text.to_string());
            text.to_string()
        });
        let text =
            jinja(|| template.render(plain_variables))?.map_err(|e| describe(&e, Some(template.source())))?;
        if strings.is_empty() {
            return Ok(Rendered { text, user: vec![] });
        }
        let marked = jinja(|| marks::with_marks(|| template.render(variables(&mut marks::wrap))));
        let user = marked
            .ok()
            .and_then(Result::ok)
            .and_then(|marked| marks::compare(&text, &marked))
            .unwrap_or_else(|| marks::search(&text, &strings));
        Ok(Rendered { text, user })
    }
}

/// Templates can make the Jinja library itself panic (3.1.0: `loop.cycle()` without arguments divides by zero).
fn jinja<T>(f: impl FnOnce() -> T) -> Result<T, Failure> {
    guard_library("/minijinja", f).map_err(|words| format!("chat template: the Jinja engine gives up: {words}"))
}

/// As the reference hands messages to templates: without null members, and reasoning under each of its names.
fn tidy(message: &mut Map<String, Json>) {
    message.retain(|_, member| !member.is_null());
    let reasoning = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|key| message.get(*key)).cloned();
    if let Some(reasoning) = reasoning {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert("reasoning_content".into(), reasoning);
    }
}

/// JSON as the template sees it; `marker` gives the replacement of each string that the user wrote.
fn value(json: &Json, source: Source, marker: &mut dyn FnMut(&str) -> String) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => Value::from(n),
            (_, Some(n)) => Value::from(n),
            _ => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) if source.marks(text) => Value::from(marker(text)),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => Value::from(items.iter().map(|item| value(item, source, marker)).collect::<Vec<_>>()),
        Json::Object(members) => Value::from_pairs(
            members
                .iter()
                .map(|(key, member)| {
                    let name = if is_word(key) { key.clone() } else { marker(key) };
                    (name, value(member, source.below(key, member), marker))
                })
                .collect::<Vec<_>>(),
        ),
    }
}

fn parse(json: &str, what: &str) -> Result<Json, Failure> {
    serde_json::from_str(json).map_err(|e| format!("{what} are not valid JSON: {e}"))
}

fn object(json: &str, what: &str) -> Result<Map<String, Json>, Failure> {
    match if json.is_empty() { Json::Null } else { parse(json, what)? } {
        Json::Null => Ok(Map::new()),
        Json::Object(members) => Ok(members),
        _ => Err(format!("{what} are not an object")),
    }
}

/// "{% generation %}" blocks tell trainers which text the model wrote; here they are blocks with a scope of their own.
/// Replaced letter by letter, so that lines and columns in errors stay right.
fn generation_as_with(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{").filter(|at| at + 1 < rest.len()) {
        let close = match &rest[at..at + 1 + rest[at + 1..].chars().next().map_or(0, char::len_utf8)] {
            "{%" => "%}",
            "{{" => "}}",
            "{#" => "#}",
            _ => {
                out.push_str(&rest[..at + 1]);
                rest = &rest[at + 1..];
                continue;
            }
        };
        let end = at + 2 + end_of_tag(&rest[at + 2..], close);
        let tag = &rest[at + 2..end];
        out.push_str(&rest[..at + 2]);
        let name = tag.trim_end_matches(close).trim_matches(['-', '+']).trim();
        match name {
            "generation" if close == "%}" => out.push_str(&tag.replacen("generation", "with      ", 1)),
            "endgeneration" if close == "%}" => out.push_str(&tag.replacen("endgeneration", "endwith      ", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

/// Bytes up to and with `close`, which doesn't count inside of a string.
fn end_of_tag(text: &str, close: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match quote {
            Some(open) => {
                quote = if c == open && !escaped { None } else { quote };
                escaped = c == '\\' && !escaped;
            }
            None if text[at..].starts_with(close) => return at + close.len(),
            None if close != "#}" && (c == '"' || c == '\'') => quote = Some(c),
            None => {}
        }
    }
    text.len()
}

/// One sentence with the place in the template.
fn describe(error: &Error, source: Option<&str>) -> Failure {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_string);
    if std::error::Error::source(error).is_some_and(|e| e.is::<Raised>()) {
        return format!("the chat template refuses the messages: {detail}");
    }
    let mut place = error.line().map_or(String::new(), |line| format!(", line {line}"));
    if let (Some(source), Some(range)) = (source, error.range()) {
        if let Some(before) = source.get(..range.start) {
            let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            place.push_str(&format!(", column {column}"));
        }
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return format!("chat template{place}: it does not end within its limit of work");
    }
    let kind = error.kind().to_string();
    if detail == kind {
        format!("chat template{place}: {kind}")
    } else {
        format!("chat template{place}: {kind}: {detail}")
    }
}

// ---- entries -----------------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn mi_text_template_compile(
    source: *const u8,
    size: usize,
    variables: *const u8,
    variables_size: usize,
    template: *mut *mut Template,
    out: *mut Buf,
) -> i32 {
    answer(out, || {
        let compiled = Template::compile(
            text(source, size, "the chat template")?,
            text(variables, variables_size, "a variable")?,
        )?;
        *template = Box::into_raw(Box::new(compiled));
        Ok(vec![])
    })
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_template_free(template: *mut Template) {
    if !template.is_null() {
        drop(Box::from_raw(template));
    }
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_template_render(
    template: *const Template,
    messages: *const u8,
    messages_size: usize,
    tools: *const u8,
    tools_size: usize,
    extra: *const u8,
    extra_size: usize,
    add_generation_prompt: i32,
    user: *mut Buf,
    out: *mut Buf,
) -> i32 {
    answer(out, || {
        let messages = text(messages, messages_size, "the messages")?;
        let tools = text(tools, tools_size, "the tools")?;
        let extra = text(extra, extra_size, "the template variables")?;
        let rendered = (*template).render(messages, tools, extra, add_generation_prompt != 0)?;
        let ends = rendered.user.iter().flat_map(|range| [range.begin, range.end]);
        *user = Buf::new(ends.flat_map(usize::to_ne_bytes).collect());
        Ok(rendered.text.into_bytes())
    })
}
