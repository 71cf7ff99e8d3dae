//! What chat templates expect of Python: str(), repr(), json.dumps(), strftime().

use crate::marks::{marking, CLOSE, OPEN};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// str(value) as `{{ value }}` prints it.
pub fn str_of(value: &Value) -> String {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => repr(value),
        _ => match float_of(value) {
            Some(number) => float_repr(number),
            None => value.to_string(),
        },
    }
}

fn float_of(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        f64::try_from(value.clone()).ok()
    } else {
        None
    }
}

fn repr(value: &Value) -> String {
    let items = |value: &Value| value.try_iter().into_iter().flatten().map(|item| repr(&item)).collect::<Vec<_>>();
    match value.kind() {
        ValueKind::String => str_repr(value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            let pairs = value.try_iter().into_iter().flatten();
            let pairs: Vec<_> = pairs
                .map(|key| format!("{}: {}", repr(&key), repr(&value.get_item(&key).unwrap_or_default())))
                .collect();
            format!("{{{}}}", pairs.join(", "))
        }
        ValueKind::Seq | ValueKind::Iterable if value.is_tuple() => {
            let items = items(value);
            if items.len() == 1 {
                format!("({},)", items[0])
            } else {
                format!("({})", items.join(", "))
            }
        }
        ValueKind::Seq | ValueKind::Iterable => format!("[{}]", items(value).join(", ")),
        _ => str_of(value),
    }
}

fn str_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => write!(out, "\\x{:02x}", c as u32).expect("a string"),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// repr(float): the shortest digits that read back, with an exponent below 1e-4 and from 1e16.
pub fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = number.to_string();
    if plain.contains('.') {
        plain
    } else {
        format!("{plain}.0")
    }
}

/// The arguments of json.dumps.
pub struct Dumps {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
}

impl Dumps {
    pub fn dump(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        const MOST: usize = 256;
        if depth > MOST {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match float_of(value) {
                Some(x) if x.is_nan() => out.push_str("NaN"),
                Some(x) if x.is_infinite() => out.push_str(if x > 0.0 { "Infinity" } else { "-Infinity" }),
                Some(x) => out.push_str(&float_repr(x)),
                None => out.push_str(&value.to_string()),
            },
            ValueKind::String => self.write_string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut is_empty = true;
                out.push('[');
                for item in value.try_iter()? {
                    if !std::mem::take(&mut is_empty) {
                        out.push_str(&self.item_separator);
                    }
                    self.new_line(depth + 1, out);
                    self.write(&item, depth + 1, out)?;
                }
                if !is_empty {
                    self.new_line(depth, out);
                }
                out.push(']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    if i > 0 {
                        out.push_str(&self.item_separator);
                    }
                    self.new_line(depth + 1, out);
                    match key.as_str() {
                        Some(text) => self.write_string(text, out),
                        None => {
                            out.push('"');
                            self.write(key, depth + 1, out)?;
                            out.push('"');
                        }
                    }
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, out)?;
                }
                if !keys.is_empty() {
                    self.new_line(depth, out);
                }
                out.push('}');
            }
            kind => {
                return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: an {kind} value is not JSON")))
            }
        }
        Ok(())
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                OPEN | CLOSE if marking() => out.push(c),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").expect("a string");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// datetime.now().strftime(format), in the process's time zone.
pub fn strftime_now(format: &str) -> Result<String, Error> {
    if format.is_empty() {
        return Ok(String::new());
    }
    // A blank in front: strftime answers 0 both for an empty result and for a buffer that is too small.
    let format = std::ffi::CString::new(format!(" {format}"))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "strftime_now: the format holds a zero byte"))?;
    let mut buffer = vec![0u8; 64 + 16 * format.as_bytes().len()];
    let written = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut parts: libc::tm = std::mem::zeroed();
        libc::localtime_r(&now, &mut parts);
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), format.as_ptr(), &parts)
    };
    if written == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: the result is too long"));
    }
    Ok(String::from_utf8_lossy(&buffer[1..written]).into_owned())
}
