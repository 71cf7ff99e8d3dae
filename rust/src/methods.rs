//! Python's string methods and Jinja's string filters. They give what Python gives and carry the marks of user text
//! (`marks`) along; the methods that only ask about a string are minijinja-contrib's, asked about the plain text.

use crate::marks::{marking, without_marks, Marked};
use crate::python::{str_of, strftime_now, Dumps};
use minijinja::value::{from_args, Kwargs, Rest, Tuple, Value, ValueKind};
use minijinja::{filters, Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

pub fn install(env: &mut Environment) {
    minijinja_contrib::add_to_environment(env);
    env.set_unknown_method_callback(call_method);
    env.set_formatter(|out, _, value| {
        let written = match value.kind() {
            ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Number => out.write_str(&str_of(value)),
            _ => write!(out, "{value}"),
        };
        written.map_err(Error::from)
    });
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, without_marks(&message)).with_source(Raised))
    });
    env.add_function("strftime_now", |format: String| strftime_now(&without_marks(&format)));
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| {
        if value.kind() == ValueKind::String {
            value.clone()
        } else {
            Value::from(str_of(value))
        }
    });
    for name in ["upper", "lower", "capitalize", "replace"] {
        env.add_filter(name, move |state: &mut State, value: &Value, args: Rest<Value>| {
            on_text(state, value, name, &args)
        });
    }
    // Jinja's title() begins words elsewhere than Python's.
    env.add_filter("title", |value: &Value| {
        let text = Marked::of(&str_of(value));
        text.like(filters::title(text.plain.as_str().into()))
    });
    env.add_filter("trim", |state: &mut State, value: &Value, args: Rest<Value>| on_text(state, value, "strip", &args));
    // Filters that look at single letters: on the plain text.
    for (name, builtin) in [
        ("length", Value::from_function(filters::length)),
        ("count", Value::from_function(filters::length)),
        ("first", Value::from_function(filters::first)),
        ("last", Value::from_function(filters::last)),
        ("list", Value::from_function(filters::list)),
        ("reverse", Value::from_function(filters::reverse)),
        ("int", Value::from_function(filters::int)),
        ("float", Value::from_function(filters::float)),
    ] {
        env.add_filter(name, move |state: &mut State, value: &Value, args: Rest<Value>| {
            let all: Vec<Value> = std::iter::once(plain(value)).chain(args.0).collect();
            builtin.call(state, &all)
        });
    }
    // As Python counts them: strings are both, none is neither, an undefined value can be iterated.
    let has_items = |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable)
    };
    env.add_test("sequence", has_items);
    env.add_test("iterable", move |value: &Value| value.is_undefined() || has_items(value));
}

/// The source of errors that the template raised itself.
#[derive(Debug)]
pub struct Raised;
impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("raised by the template")
    }
}
impl std::error::Error for Raised {}

fn plain(value: &Value) -> Value {
    match value.as_str() {
        Some(text) if marking() => Value::from(without_marks(text)),
        _ => value.clone(),
    }
}

fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = indent.or(options.get("indent")?);
    let indent = match indent {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_string()),
            None => Some(" ".repeat(i64::try_from(indent)?.clamp(0, 64) as usize)),
        },
    };
    let separators: Option<Value> = options.get("separators")?;
    let (item_separator, key_separator) = match separators.filter(|s| !s.is_none()) {
        Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    Dumps { ensure_ascii, indent, item_separator, key_separator, sort_keys }.dump(value)
}

/// A string filter is the method of the same name on str(value).
fn on_text(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let text = if value.kind() == ValueKind::String { value.clone() } else { Value::from(str_of(value)) };
    string_method(state, &text, method, args)
}

fn call_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        string_method(state, value, method, args)
    } else {
        unknown_method_callback(state, value, method, args)
    }
}

fn string_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let text = Marked::of(value.as_str().unwrap_or_default());
    let plain_args: Vec<Value> = args.iter().map(plain).collect();
    let plain_text = text.plain.as_str();
    let all = |(begin, end): (usize, usize)| Value::from(text.cut(begin, end));
    let list = |parts: Vec<(usize, usize)>| Value::from(parts.into_iter().map(all).collect::<Vec<_>>());
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let (letters,): (Option<&str>,) = from_args(&plain_args)?;
            let goes = |c: char| letters.map_or(c.is_whitespace(), |letters| letters.contains(c));
            let begin =
                if method == "rstrip" { 0 } else { plain_text.len() - plain_text.trim_start_matches(goes).len() };
            let end = if method == "lstrip" { plain_text.len() } else { plain_text.trim_end_matches(goes).len() };
            Ok(all((begin, end.max(begin))))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(&plain_args)?;
            Ok(all((if plain_text.starts_with(prefix) { prefix.len() } else { 0 }, plain_text.len())))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(&plain_args)?;
            Ok(all((0, plain_text.strip_suffix(suffix).unwrap_or(plain_text).len())))
        }
        "split" | "rsplit" => {
            let (separator, most, options): (Option<&str>, Option<i64>, Kwargs) = from_args(&plain_args)?;
            let separator = separator.or(options.get("sep")?);
            let most =
                most.or(options.get("maxsplit")?).and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            options.assert_all_used()?;
            Ok(list(match separator {
                Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "split: empty separator")),
                Some(separator) => split_at(plain_text, separator, most, method == "rsplit"),
                None => split_words(plain_text, most, method == "rsplit"),
            }))
        }
        "splitlines" => {
            let (keep, options): (Option<bool>, Kwargs) = from_args(&plain_args)?;
            let keep = keep.or(options.get("keepends")?).unwrap_or(false);
            Ok(list(split_lines(plain_text, keep)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(&plain_args)?;
            let len = plain_text.len();
            let found = if method == "partition" { plain_text.find(separator) } else { plain_text.rfind(separator) };
            let parts = match found {
                Some(at) => [(0, at), (at, at + separator.len()), (at + separator.len(), len)],
                None if method == "partition" => [(0, len), (len, len), (len, len)],
                None => [(0, 0), (0, 0), (0, len)],
            };
            Ok(Value::from(Tuple::from(parts.map(all))))
        }
        "replace" if !plain_args.is_empty() && plain_args[0].as_str().is_some_and(|old| !old.is_empty()) => {
            let (old, new, count, options): (&str, &Value, Option<i64>, Kwargs) = from_args(args)?;
            let old = without_marks(old);
            let count = count.or(options.get("count")?).and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            let new = new.to_string();
            // Paid for before it is built: a replacement can be a lot longer than what it replaces.
            let places = || plain_text.match_indices(&old).take(count).map(|(at, _)| at);
            let cost = places().count().saturating_mul(new.len() + 64).saturating_add(plain_text.len());
            state.consume_fuel((cost / 64) as u64)?;
            let mut out = String::new();
            let mut done = 0;
            for at in places() {
                out.push_str(&text.cut(done, at));
                out.push_str(&new);
                done = at + old.len();
            }
            out.push_str(&text.cut(done, plain_text.len()));
            Ok(Value::from(out))
        }
        "title" => Ok(Value::from(text.like(python_title(plain_text)))),
        "upper" | "lower" | "capitalize" => {
            let changed = unknown_method_callback(state, &Value::from(plain_text), method, &plain_args)?;
            Ok(Value::from(text.like(changed.to_string())))
        }
        "casefold" => Ok(Value::from(text.like(plain_text.to_lowercase()))),
        "index" | "rindex" => {
            let found = unknown_method_callback(
                state,
                &Value::from(plain_text),
                &method.replace("index", "find"),
                &plain_args,
            )?;
            if found == Value::from(-1) {
                Err(Error::new(ErrorKind::InvalidOperation, "substring not found"))
            } else {
                Ok(found)
            }
        }
        // These put strings together: the marks travel inside them.
        "join" | "format" => unknown_method_callback(state, value, method, args),
        _ => unknown_method_callback(state, &Value::from(plain_text), method, &plain_args),
    }
}

/// str.title(): a capital after every letter that isn't one.
fn python_title(text: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

type Parts = Vec<(usize, usize)>;

fn split_at(text: &str, separator: &str, most: usize, from_right: bool) -> Parts {
    let mut places: Vec<usize> = if from_right {
        text.rmatch_indices(separator).take(most).map(|m| m.0).collect()
    } else {
        text.match_indices(separator).take(most).map(|m| m.0).collect()
    };
    places.sort_unstable();
    let mut parts = vec![];
    let mut done = 0;
    for at in places {
        parts.push((done, at));
        done = at + separator.len();
    }
    parts.push((done, text.len()));
    parts
}

/// str.split() at runs of blanks. What is left after `most` cuts keeps the blanks at its far end.
fn split_words(text: &str, most: usize, from_right: bool) -> Parts {
    let mut parts: Parts = vec![];
    let (mut begin, mut end) = (0, text.len());
    loop {
        let rest = &text[begin..end];
        if from_right {
            end = begin + rest.trim_end().len();
        } else {
            begin = end - rest.trim_start().len();
        }
        let rest = &text[begin..end];
        if rest.is_empty() {
            break;
        }
        let gap = if from_right { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        match gap.filter(|_| parts.len() < most) {
            Some(at) if from_right => {
                let word = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                parts.push((begin + word, end));
                end = begin + at;
            }
            Some(at) => {
                parts.push((begin, begin + at));
                begin += at;
            }
            None => {
                parts.push((begin, end));
                break;
            }
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn split_lines(text: &str, keep_ends: bool) -> Parts {
    let is_end =
        |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut parts = vec![];
    let mut done = 0;
    let mut letters = text.char_indices().peekable();
    while let Some((at, c)) = letters.next() {
        if !is_end(c) {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && letters.next_if(|next| next.1 == '\n').is_some() {
            end += 1;
        }
        parts.push((done, if keep_ends { end } else { at }));
        done = end;
    }
    if done < text.len() {
        parts.push((done, text.len()));
    }
    parts
}
