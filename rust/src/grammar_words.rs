//! What llguidance finds wrong with a grammar, said to whoever wrote it: the library speaks of its own options, states
//! and limits. Where a schema is at fault, its place in it is named.

use serde_json::{Map, Value as Json};

/// In characters; errors quote parts of the grammar, which may be as long as it is.
const LONGEST: usize = 300;

type Found<'a> = &'a dyn Fn(&Map<String, Json>) -> bool;

/// The place of the first part of a schema that `found` is true for: "properties.a.items"; "" is the whole.
fn place_of(schema: &Json, found: Found) -> Option<String> {
    let Json::Object(members) = schema else { return None };
    if found(members) {
        return Some(String::new());
    }
    let within = |name: String, part: &Json| {
        place_of(part, found).map(|rest| if rest.is_empty() { name } else { format!("{name}.{rest}") })
    };
    members.iter().find_map(|(key, value)| match (key.as_str(), value) {
        ("properties" | "patternProperties" | "$defs" | "definitions", Json::Object(parts)) => {
            parts.iter().find_map(|(name, part)| within(format!("{key}.{name}"), part))
        }
        ("anyOf" | "allOf" | "oneOf" | "prefixItems" | "items", Json::Array(parts)) => {
            parts.iter().enumerate().find_map(|(i, part)| within(format!("{key}[{i}]"), part))
        }
        ("items" | "additionalProperties" | "additionalItems", part) => within(key.clone(), part),
        _ => None,
    })
}

fn at(schema: &Json, found: Found) -> String {
    match place_of(schema, found) {
        Some(place) if !place.is_empty() => format!(" (at {place})"),
        _ => String::new(),
    }
}

pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}

/// The error without the traces that follow it.
fn brief(error: &str) -> &str {
    error.split("\n<").next().unwrap_or(error).trim()
}

/// The number behind `words`.
fn number_after<'a>(error: &'a str, words: &str) -> Option<&'a str> {
    let rest = &error[error.find(words)? + words.len()..];
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

const TOO_LARGE: [&str; 7] = ["too big", "fuel exhausted", "too many states", "too many expressions", "check fuel", "schema too large", "stack level exceeded"];

/// A limit of the library that was met, or None.
fn limit(error: &str) -> Option<String> {
    if let Some(items) = number_after(error, "Current row has ") {
        let most = number_after(error, "max is ").unwrap_or("fewer");
        return Some(format!("{items} ways to go on are open at one place of the text; {most} are the most"));
    }
    TOO_LARGE.iter().any(|words| error.contains(words)).then(|| "its parts are too many, or too large together, to be followed token by token".into())
}

/// Why a grammar could not be made into a parser. schema: of a JSON schema.
pub fn refused(error: &str, schema: Option<&Json>) -> String {
    let error = brief(error);
    if let Some(reason) = limit(error) {
        return reason;
    }
    if let Some((_, reason)) = error.split_once("\nerror: ").filter(|_| error.contains("regex parse error")) {
        return format!("a pattern cannot be read: {}", shortened(reason));
    }
    let Some(schema) = schema else { return shortened(error) };
    if let Some(keys) = error.strip_prefix("Unimplemented keys: ") {
        let names: Vec<String> = serde_json::from_str(keys).unwrap_or_default();
        let place = at(schema, &|part| names.iter().any(|name| part.contains_key(name)));
        return format!("{} cannot be followed{place}", shortened(&names.join(", ")));
    }
    if error.starts_with("oneOf constraints are not supported") {
        let place = at(schema, &|part| part.contains_key("oneOf"));
        return format!("oneOf can be followed only where no value can be two of its choices{place}; anyOf always can");
    }
    if error.starts_with("Failed to generate regex for") {
        let bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
        let place = at(schema, &|part| bounds.iter().any(|bound| part.contains_key(*bound)));
        return format!("the bounds of a number, minimum to maximum, are too far apart or leave nothing between them{place}");
    }
    if let Some(name) = error.strip_prefix("Invalid type: ") {
        let place = at(schema, &|part| part.get("type").is_some_and(|t| t == name || t.as_array().is_some_and(|list| list.iter().any(|t| t == name))));
        return format!("there is no type '{}'{place}", shortened(name));
    }
    if let Some(pointer) = error.strip_prefix("Pointer '").and_then(|rest| rest.strip_suffix("' does not exist")) {
        let target = format!("#{pointer}");
        let place = at(schema, &|part| part.get("$ref").is_some_and(|to| to == &target));
        return format!("$ref '{}' leads nowhere{place}", shortened(&target));
    }
    if let Some(rest) = error.strip_prefix("patternProperty regexes ").and_then(|rest| rest.strip_suffix(" are not disjoint")) {
        return format!("of patternProperties only one may hold for a name, and {} have names in common", shortened(rest));
    }
    if let Some(reason) = error.strip_prefix("Unsatisfiable schema: ") {
        return format!("no value can satisfy it: {}", shortened(reason));
    }
    shortened(error)
}

/// Why a parser could not go on.
pub fn stuck(error: &str) -> String {
    let error = brief(error);
    if error.is_empty() || error.contains("NoExtension") {
        return "no token of this model can follow".into();
    }
    limit(error).unwrap_or_else(|| shortened(error.trim_start_matches("Parser Error: ")))
}
