//! From ids to text. A tokenizer.json names its decoder as a chain of steps over the list of tokens; here the chain is
//! turned into one piece of bytes per token plus a small state machine, so that text can leave token by token and the
//! joined pieces are the decoding of the whole. A step that has no such form is refused when the tokenizer is loaded.
//!
//! One deliberate difference: the bytes of byte-fallback tokens (`<0xE4>`) leave as soon as they form a character, and
//! each byte that can't is one U+FFFD. The reference replaces a whole run of byte tokens when any of it is broken.

use crate::Failure;
use serde_json::Value;

/// How the piece of a token follows from its name.
#[derive(Debug, Default)]
pub struct Decoding {
    steps: Vec<Step>,
    byte_level: bool,
    byte_fallback: bool,
    /// No decoder in the file: tokens joined by blanks.
    join: bool,
    /// After joining: this many leading characters go, while they are equal to the given one.
    strip: Option<(char, usize)>,
}

#[derive(Debug)]
enum Step {
    Replace { pattern: String, content: String },
    Strip { content: char, start: usize, stop: usize },
    Metaspace { replacement: char, first_without: bool },
}

/// The bytes of one token.
pub struct Piece {
    pub bytes: Vec<u8>,
    /// A byte-fallback token: its byte joins with its neighbours'.
    pub is_byte: bool,
}

impl Decoding {
    /// `json`: the value of "decoder".
    pub fn parse(json: &Value) -> Result<Decoding, Failure> {
        let mut decoding = Decoding::default();
        if json.is_null() {
            decoding.join = true;
            return Ok(decoding);
        }
        let mut fused = false;
        decoding.add(json, &mut fused)?;
        Ok(decoding)
    }

    /// Steps beside ByteLevel are left out when no token can meet them, as converters from other formats write them
    /// (ByteFallback and the replacement of U+2581 before ByteLevel); one that could act is refused. `names`: every
    /// token's name, and whether it stands outside the byte alphabet.
    pub fn settle<'a>(&mut self, names: impl Iterator<Item = (&'a str, bool)>) -> Result<(), Failure> {
        if !self.byte_level || (self.steps.is_empty() && !self.byte_fallback && self.strip.is_none()) {
            return Ok(());
        }
        let only_replaces = self.steps.iter().all(|s| matches!(s, Step::Replace { .. }));
        if !only_replaces || self.strip.is_some() {
            return Err("its decoder mixes ByteLevel with other steps, which is not supported".into());
        }
        for (name, spelled_out) in names {
            let bytes = bytes_of_alphabet(name);
            let meets = |s: &Step| matches!(s, Step::Replace { pattern, .. } if name.contains(pattern.as_str()));
            // After Fuse, ByteLevel reads the whole text in the byte alphabet or not at all: every name must be the
            // same bytes in both readings, or spelled in the alphabet.
            let read_alike = bytes.as_deref().is_some_and(|b| !spelled_out || b == name.as_bytes());
            if !read_alike || (self.byte_fallback && fallback_byte(name).is_some()) || self.steps.iter().any(meets) {
                return Err(format!(
                    "its decoder mixes ByteLevel with other steps, which would change the token {name:?}; this is not supported"
                ));
            }
        }
        self.steps.clear();
        self.byte_fallback = false;
        Ok(())
    }

    fn add(&mut self, json: &Value, fused: &mut bool) -> Result<(), Failure> {
        let kind = json["type"].as_str().unwrap_or("(none)");
        let unsupported = |why: &str| Err(format!("its decoder step {kind}{why} is not supported"));
        match kind {
            "Sequence" => {
                for step in json["decoders"].as_array().map(Vec::as_slice).unwrap_or_default() {
                    self.add(step, fused)?;
                }
            }
            "Fuse" => *fused = true,
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" if *fused => return unsupported(" after Fuse"),
            "ByteFallback" => self.byte_fallback = true,
            "Strip" => {
                let content = json["content"].as_str().and_then(|s| s.chars().next()).unwrap_or(' ');
                let start = json["start"].as_u64().unwrap_or(0) as usize;
                let stop = json["stop"].as_u64().unwrap_or(0) as usize;
                if !*fused {
                    self.steps.push(Step::Strip { content, start, stop });
                } else if stop != 0 || self.strip.is_some() {
                    return unsupported(" at the end of the text");
                } else {
                    self.strip = Some((content, start));
                }
            }
            "Replace" => {
                let content = json["content"].as_str().unwrap_or_default().to_string();
                match json["pattern"]["String"].as_str() {
                    Some(pattern) if !pattern.is_empty() && (!*fused || pattern.chars().count() == 1) => {
                        self.steps.push(Step::Replace { pattern: pattern.to_string(), content });
                    }
                    Some(_) => return unsupported(" of several characters after Fuse"),
                    None => return unsupported(" with a regular expression"),
                }
            }
            "Metaspace" if *fused => return unsupported(" after Fuse"),
            "Metaspace" => {
                let replacement = json["replacement"].as_str().and_then(|s| s.chars().next()).unwrap_or('▁');
                let prefix_space = json["add_prefix_space"].as_bool().unwrap_or(true);
                let first_without = match json["prepend_scheme"].as_str() {
                    Some(scheme) => scheme != "never",
                    None => prefix_space,
                };
                self.steps.push(Step::Metaspace { replacement, first_without });
            }
            _ => return unsupported(""),
        }
        Ok(())
    }

    /// The piece of a token named `name`; `added`: an added token, whose text is not spelled in the byte alphabet.
    /// `first`: it opens the text.
    pub fn piece(&self, name: &str, added: bool, first: bool) -> Piece {
        if let (true, Some(byte)) = (self.byte_fallback, fallback_byte(name)) {
            return Piece { bytes: vec![byte], is_byte: true };
        }
        if self.byte_level {
            let bytes = if added { None } else { bytes_of_alphabet(name) };
            return Piece { bytes: bytes.unwrap_or_else(|| name.as_bytes().to_vec()), is_byte: false };
        }
        let mut text = name.to_string();
        if self.join && !first {
            text.insert(0, ' ');
        }
        for step in &self.steps {
            text = step.apply(text, first);
        }
        Piece { bytes: text.into_bytes(), is_byte: false }
    }

    /// Does a piece depend on whether it opens the text?
    pub fn first_differs(&self) -> bool {
        self.join || self.steps.iter().any(|s| matches!(s, Step::Metaspace { first_without: true, .. }))
    }
}

impl Step {
    fn apply(&self, text: String, first: bool) -> String {
        match self {
            Step::Replace { pattern, content } => text.replace(pattern.as_str(), content),
            Step::Strip { content, start, stop } => {
                let mut rest = text.as_str();
                for _ in 0..*start {
                    rest = rest.strip_prefix(*content).unwrap_or(rest);
                }
                for _ in 0..*stop {
                    rest = rest.strip_suffix(*content).unwrap_or(rest);
                }
                rest.to_string()
            }
            Step::Metaspace { replacement, first_without } if first && *first_without => text.replace(*replacement, ""),
            Step::Metaspace { replacement, .. } => text.replace(*replacement, " "),
        }
    }
}

/// The byte of a token named like `<0xE4>`.
fn fallback_byte(name: &str) -> Option<u8> {
    let digits = name.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The bytes that a word in the byte alphabet of GPT-2 stands for; None when a letter is not of that alphabet.
/// The alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100, U+0101, ... in ascending order.
fn bytes_of_alphabet(word: &str) -> Option<Vec<u8>> {
    word.chars().map(byte_of_letter).collect()
}

fn byte_of_letter(letter: char) -> Option<u8> {
    let is_itself = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = letter as u32;
    if is_itself(code) {
        return Some(code as u8);
    }
    // The n-th byte that isn't printable: 0x00-0x20, 0x7f-0xa0, 0xad.
    match code.checked_sub(0x100)? {
        n @ 0..=0x20 => Some(n as u8),
        n @ 0x21..=0x42 => Some((n - 0x21 + 0x7f) as u8),
        0x43 => Some(0xad),
        _ => None,
    }
}

/// Joins pieces into text. What can't be decided yet (an unfinished character, blanks to strip) stays inside.
pub struct Joiner {
    strip: Option<(char, usize)>,
    strip_left: usize,
    per_byte: bool,
    pending: Vec<u8>,
    out: Vec<u8>,
}

const REPLACEMENT: &str = "\u{fffd}";

impl Joiner {
    pub fn new(decoding: &Decoding) -> Joiner {
        let strip_left = decoding.strip.map_or(0, |s| s.1);
        Joiner { strip: decoding.strip, strip_left, per_byte: decoding.byte_fallback, pending: vec![], out: vec![] }
    }

    /// The text that became certain through this piece.
    pub fn push(&mut self, bytes: &[u8], is_byte: bool) -> &[u8] {
        self.out.clear();
        if self.per_byte && !is_byte {
            self.drop_pending();
        }
        self.pending.extend_from_slice(bytes);
        self.emit_certain();
        &self.out
    }

    /// The rest; the joiner is then as new.
    pub fn finish(&mut self) -> &[u8] {
        self.out.clear();
        self.drop_pending();
        self.strip_left = self.strip.map_or(0, |s| s.1);
        &self.out
    }

    fn drop_pending(&mut self) {
        let marks = if self.per_byte { self.pending.len() } else { self.pending.len().min(1) };
        self.pending.clear();
        for _ in 0..marks {
            self.emit(REPLACEMENT);
        }
    }

    fn emit_certain(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        let mut rest = pending.as_slice();
        while !rest.is_empty() {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.emit(text);
                    rest = &[];
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    self.emit(std::str::from_utf8(good).unwrap_or_default());
                    rest = bad;
                    let Some(len) = error.error_len() else { break }; // unfinished: wait
                    for _ in 0..if self.per_byte { len } else { 1 } {
                        self.emit(REPLACEMENT);
                    }
                    rest = &rest[len..];
                }
            }
        }
        let keep = pending.len() - rest.len();
        self.pending = pending;
        self.pending.drain(..keep);
    }

    fn emit(&mut self, mut text: &str) {
        if let (Some((content, _)), true) = (self.strip, self.strip_left > 0) {
            while self.strip_left > 0 && !text.is_empty() {
                match text.strip_prefix(content) {
                    Some(rest) => {
                        text = rest;
                        self.strip_left -= 1;
                    }
                    None => self.strip_left = 0,
                }
            }
        }
        self.out.extend_from_slice(text.as_bytes());
    }
}
