//! Grammars that restrict generation (llguidance): which tokens may come next, and whether the text is complete.

use crate::grammar_words::{refused, shortened, stuck};
use crate::tokenizer::Tokenizer;
use crate::{answer, guard, slice, text, Buf, Failure};
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId};
use llguidance::ParserFactory;
use serde_json::{json, Value as Json};
use std::sync::Arc;

/// Blanks between the parts of JSON. Bounded, because a model that is kept from what it wants to say likes to go on
/// with blanks for ever.
const JSON_BLANKS: &str = r"[\x20\x0A\x0D\x09]{1,40}";
const MAX_GRAMMAR_BYTES: usize = 512 << 10;
/// For making a parser, which recurses along references of a schema and rules of a grammar: a chain of as many as
/// MAX_GRAMMAR_BYTES holds takes a third of it. Only what is used of it becomes memory.
const STACK_BYTES: usize = 256 << 20;

/// Beyond, a parser does not get ready in minutes and takes more and more memory: it goes through the remainders. Those
/// of 2 and 5 are few, since the last digits decide. 49999: 0.9 s; 999983: none after 60.
const MAX_MULTIPLE: u64 = 50_000;
const MAX_ROUND_MULTIPLE: f64 = 1e6;

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

/// All values of multipleOf in the schema, whose parts may be combined.
fn multiples(schema: &Json, found: &mut Vec<f64>) {
    match schema {
        Json::Object(members) => {
            found.extend(members.get("multipleOf").and_then(Json::as_f64));
            members.values().for_each(|value| multiples(value, found));
        }
        Json::Array(values) => values.iter().for_each(|value| multiples(value, found)),
        _ => {}
    }
}

fn check_multiples(schema: &Json) -> Result<(), Failure> {
    let mut found = vec![];
    multiples(schema, &mut found);
    let mut common = 1u64;
    for value in found {
        let mut whole = value.abs();
        while whole.fract() != 0.0 && whole < MAX_ROUND_MULTIPLE {
            whole *= 10.0;
        }
        let mut rest = if whole <= MAX_ROUND_MULTIPLE { (whole as u64).max(1) } else { u64::MAX };
        for factor in [2, 5] {
            while rest % factor == 0 {
                rest /= factor;
            }
        }
        common = if rest <= MAX_MULTIPLE { common / gcd(common, rest) * rest } else { rest };
        if common > MAX_MULTIPLE {
            return Err(format!("multipleOf {value:?} can't be followed: up to {MAX_MULTIPLE} can, all such numbers of a schema together, not counting factors 2 and 5"));
        }
    }
    Ok(())
}

/// Beyond, a parser takes time that grows with the square or the cube of their number: every two patterns are compared, and
/// every optional member may follow every other. 64 patterns: 20 ms, 500: more than a minute; 500 optional members: 60 ms
/// and as many ways to go on as a parser may have, 10000: a minute.
const MAX_PATTERN_PROPERTIES: usize = 64;
const MAX_OPTIONAL_PROPERTIES: usize = 500;

/// Adds up the patternProperties of all objects in the schema.
fn check_members(schema: &Json, patterns: &mut usize) -> Result<(), Failure> {
    match schema {
        Json::Object(members) => {
            if let Some(Json::Object(found)) = members.get("patternProperties") {
                *patterns += found.len();
                if *patterns > MAX_PATTERN_PROPERTIES {
                    return Err(format!("it has more than {MAX_PATTERN_PROPERTIES} patternProperties"));
                }
            }
            if let Some(Json::Object(properties)) = members.get("properties") {
                let required: std::collections::HashSet<&str> = match members.get("required") {
                    Some(Json::Array(names)) => names.iter().filter_map(Json::as_str).collect(),
                    _ => Default::default(),
                };
                let optional = properties.keys().filter(|name| !required.contains(name.as_str())).count();
                if optional > MAX_OPTIONAL_PROPERTIES {
                    return Err(format!("an object has {optional} properties that are not required; up to {MAX_OPTIONAL_PROPERTIES} may be"));
                }
            }
            members.values().try_for_each(|value| check_members(value, patterns))
        }
        Json::Array(values) => values.iter().try_for_each(|value| check_members(value, patterns)),
        _ => Ok(()),
    }
}

fn on_a_large_stack<T: Send>(make: impl FnOnce() -> Result<T, Failure> + Send) -> Result<T, Failure> {
    std::thread::scope(|scope| {
        match std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, make) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(e) => Err(format!("no thread to read the grammar: {e}")),
        }
    })
}

pub struct Factory {
    parsers: ParserFactory,
    ends: Vec<TokenId>,
}

impl Factory {
    pub fn new(tokenizer: &Tokenizer, ends: &[TokenId], vocab: usize) -> Result<Factory, Failure> {
        if let Some(end) = ends.iter().find(|&&end| end as usize >= vocab) {
            return Err(format!("the end token {end} is outside of the vocabulary of {vocab}"));
        }
        let Some(&first_end) = ends.first() else {
            return Err(
                "a grammar needs an end token, and the model names none (eos_token_id in generation_config.json)"
                    .into(),
            );
        };
        // Longer tokens don't fit into the trie; no grammar allows them then.
        const LONGEST: usize = 1000;
        let words: Vec<Vec<u8>> = (0..vocab as u32)
            .map(|id| match tokenizer.bytes(id) {
                bytes if bytes.len() > LONGEST => vec![],
                bytes if tokenizer.is_control(id) => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
                bytes => bytes.to_vec(),
            })
            .collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, first_end), &words).with_eos_tokens(ends);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let capabilities =
            InferenceCapabilities { ff_tokens: false, conditional_ff_tokens: false, backtrack: false, fork: false };
        let mut parsers =
            ParserFactory::new(&env, capabilities, &SlicedBiasComputer::general_slices()).map_err(|e| e.to_string())?;
        parsers.quiet();
        let limits = parsers.limits_mut();
        limits.verbose_errors = false;
        limits.max_lexer_states = 50_000; // about 100 MB
        Ok(Factory { parsers, ends: ends.to_vec() })
    }

    pub fn matcher(&self, kind: &str, grammar: &str) -> Result<Matcher, Failure> {
        let name = match kind {
            "json_schema" => "JSON schema",
            "regex" => "regex",
            "lark" => "grammar",
            _ => return Err(format!("unknown kind of grammar: {kind}")),
        };
        if grammar.len() > MAX_GRAMMAR_BYTES {
            return Err(format!("the {name} has {} bytes; up to {MAX_GRAMMAR_BYTES} are accepted", grammar.len()));
        }
        let unusable = |reason: String| format!("the {name} can't be used: {reason}");
        let mut schema = None;
        let grammar = match kind {
            "json_schema" => {
                let given: Json = serde_json::from_str(grammar)
                    .map_err(|e| format!("the JSON schema is not valid JSON: {}", shortened(&e.to_string())))?;
                check_multiples(&given)?;
                check_members(&given, &mut 0).map_err(unusable)?;
                schema = Some(given.clone());
                TopLevelGrammar::from_json_schema(with_few_blanks(given)?)
            }
            "regex" => TopLevelGrammar::from_regex(grammar),
            _ => TopLevelGrammar::from_lark(grammar.to_string()),
        };
        let inner = llguidance::Matcher::new(self.parsers.create_parser(grammar));
        match inner.get_error() {
            Some(error) => Err(unusable(refused(&error, schema.as_ref()))),
            None => Ok(Matcher { inner, ends: self.ends.clone(), panicked: None }),
        }
    }
}

fn with_few_blanks(mut schema: Json) -> Result<Json, Failure> {
    match &mut schema {
        Json::Object(members) if !members.contains_key("x-guidance") => {
            members.insert("x-guidance".into(), json!({ "whitespace_pattern": JSON_BLANKS }));
        }
        Json::Object(_) | Json::Bool(_) => {}
        _ => return Err("the JSON schema is neither an object nor a boolean".into()),
    }
    Ok(schema)
}

pub struct Matcher {
    inner: llguidance::Matcher,
    ends: Vec<TokenId>,
    /// A panic of this side; what llguidance itself finds is in `inner`.
    panicked: Option<Failure>,
}

impl Matcher {
    /// Why it stopped, if not because the text is complete: a limit was exceeded, or no token leads further.
    fn failure(&self) -> Option<Failure> {
        let error = self.inner.get_error().map(|error| stuck(&error));
        self.panicked.clone().or(error).map(|reason| format!("the grammar can't be followed further: {reason}"))
    }

    /// Fills `mask`; false when generation must stop (the mask then allows the end tokens only).
    fn fill(&mut self, mask: &mut [u32]) -> bool {
        mask.fill(0);
        if !self.inner.is_stopped() {
            if let Ok(allowed) = self.inner.compute_mask() {
                let words = allowed.as_slice();
                let len = words.len().min(mask.len());
                mask[..len].copy_from_slice(&words[..len]);
                if mask.iter().any(|word| *word != 0) {
                    return true;
                }
            }
        }
        for end in &self.ends {
            if let Some(word) = mask.get_mut(*end as usize / 32) {
                *word |= 1 << (end % 32);
            }
        }
        false
    }

    fn accept(&mut self, token: TokenId) -> Result<(), Failure> {
        if self.inner.is_stopped() && !self.inner.is_error() {
            let is_end = self.ends.contains(&token);
            return if is_end {
                Ok(())
            } else {
                Err(format!("token {token} comes after the end of the text that the grammar describes"))
            };
        }
        self.inner
            .consume_token(token)
            .map_err(|e| format!("the grammar does not allow token {token} here: {}", stuck(&e.to_string())))
    }
}

// ---- entries -----------------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn mi_text_grammars_new(
    tokenizer: *const Tokenizer,
    ends: *const u32,
    num_ends: usize,
    vocab: usize,
    factory: *mut *mut Factory,
    out: *mut Buf,
) -> i32 {
    answer(out, || {
        *factory = Box::into_raw(Box::new(Factory::new(&*tokenizer, slice(ends, num_ends), vocab)?));
        Ok(vec![])
    })
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_grammars_free(factory: *mut Factory) {
    if !factory.is_null() {
        drop(Box::from_raw(factory));
    }
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_matcher_new(
    factory: *const Factory,
    kind: *const u8,
    kind_size: usize,
    grammar: *const u8,
    size: usize,
    matcher: *mut *mut Matcher,
    out: *mut Buf,
) -> i32 {
    answer(out, || {
        let (factory, kind, grammar) = (&*factory, text(kind, kind_size, "the kind")?, text(grammar, size, "the grammar")?);
        let made = on_a_large_stack(|| factory.matcher(kind, grammar))?;
        *matcher = Box::into_raw(Box::new(made));
        Ok(vec![])
    })
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_matcher_free(matcher: *mut Matcher) {
    if !matcher.is_null() {
        drop(Box::from_raw(matcher));
    }
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_matcher_clone(matcher: *const Matcher) -> *mut Matcher {
    let matcher = &*matcher;
    let copy = guard(|| {
        let panicked = matcher.panicked.clone();
        Ok(Matcher { inner: matcher.inner.deep_clone(), ends: matcher.ends.clone(), panicked })
    });
    copy.map_or(std::ptr::null_mut(), |copy| Box::into_raw(Box::new(copy)))
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_matcher_fill(matcher: *mut Matcher, mask: *mut u32, words: usize) -> i32 {
    let mask = std::slice::from_raw_parts_mut(mask, words);
    let filled = guard(|| Ok((*matcher).fill(mask)));
    filled.unwrap_or_else(|panic| {
        (*matcher).panicked = Some(panic);
        false
    }) as i32
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_matcher_failure(matcher: *const Matcher, out: *mut Buf) -> i32 {
    answer(out, || (*matcher).failure().map_or(Ok(vec![]), Err))
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_matcher_accept(matcher: *mut Matcher, token: u32, out: *mut Buf) -> i32 {
    answer(out, || (*matcher).accept(token).map(|()| vec![]))
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_matcher_finished(matcher: *const Matcher) -> i32 {
    (*matcher).inner.is_stopped() as i32
}
