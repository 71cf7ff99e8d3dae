//! Which bytes of a rendered prompt came from the user. A template is rendered twice: once as it is, and once with the
//! strings of the messages standing between two marks. Where the second text without its marks is the first, the marks
//! are exact. They are noncharacters, so no tokenizer, template or honest text uses them; string methods and filters
//! (`methods`) look through them and carry them along, so that trimming or splitting a message keeps both renderings alike.

use crate::Range;
use serde_json::Value as Json;
use std::cell::Cell;

pub const OPEN: char = '\u{fdd0}';
pub const CLOSE: char = '\u{fdd1}';
const MARKS: [char; 2] = [OPEN, CLOSE];

thread_local! {
    static MARKING: Cell<bool> = const { Cell::new(false) };
}

/// Is this the rendering with marks? Outside of it the two characters are ordinary ones.
pub fn marking() -> bool {
    MARKING.with(Cell::get)
}

/// Runs `f` as the rendering with marks.
pub fn with_marks<T>(f: impl FnOnce() -> T) -> T {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            MARKING.with(|m| m.set(false));
        }
    }
    MARKING.with(|m| m.set(true));
    let _off = Off;
    f()
}

pub fn wrap(text: &str) -> String {
    let own: String = text.chars().filter(|c| !MARKS.contains(c)).collect();
    if own.is_empty() {
        own
    } else {
        format!("{OPEN}{own}{CLOSE}")
    }
}

pub fn without_marks(text: &str) -> String {
    if marking() {
        text.chars().filter(|c| !MARKS.contains(c)).collect()
    } else {
        text.to_string()
    }
}

/// A string of the marked rendering, taken apart: the text, and which of its bytes are the user's.
pub struct Marked {
    pub plain: String,
    user: Vec<(usize, usize)>,
}

impl Marked {
    pub fn of(text: &str) -> Marked {
        let mut marked = Marked { plain: String::with_capacity(text.len()), user: vec![] };
        if !marking() {
            marked.plain.push_str(text);
            return marked;
        }
        let mut opened = None;
        for c in text.chars() {
            match c {
                OPEN => opened = Some(marked.plain.len()),
                CLOSE => marked.user.extend(opened.take().map(|begin| (begin, marked.plain.len()))),
                c => marked.plain.push(c),
            }
        }
        marked.user.extend(opened.map(|begin| (begin, marked.plain.len())));
        marked
    }

    /// Bytes [begin, end) of the plain text, with marks.
    pub fn cut(&self, begin: usize, end: usize) -> String {
        let mut text = String::with_capacity(end - begin);
        let mut done = begin;
        let first = self.user.partition_point(|&(_, to)| to <= begin);
        for &(from, to) in self.user[first..].iter().take_while(|&&(from, _)| from < end) {
            let (from, to) = (from.max(begin), to.min(end));
            if from < to {
                text.push_str(&self.plain[done..from]);
                text.extend([OPEN]);
                text.push_str(&self.plain[from..to]);
                text.extend([CLOSE]);
                done = to;
            }
        }
        text.push_str(&self.plain[done..end]);
        text
    }

    /// `changed` is the plain text letter by letter in another case: with marks at the same letters. A change that alters
    /// the number of letters loses the marks.
    pub fn like(&self, changed: String) -> String {
        if self.user.is_empty() || changed.chars().count() != self.plain.chars().count() {
            return changed;
        }
        let place =
            |byte| changed.char_indices().nth(self.plain[..byte].chars().count()).map_or(changed.len(), |(i, _)| i);
        let user = self.user.iter().map(|&(begin, end)| (place(begin), place(end))).collect();
        let len = changed.len();
        Marked { user, plain: changed }.cut(0, len)
    }
}

/// Byte ranges of `text` that stand between marks in `marked`, or None when the two differ in more than the marks.
pub fn compare(text: &str, marked: &str) -> Option<Vec<Range>> {
    let mut ranges: Vec<Range> = vec![];
    let mut add = |begin: usize, end: usize| match ranges.last_mut() {
        Some(last) if last.end == begin => last.end = end,
        _ => ranges.push(Range { begin, end }),
    };
    let mut inside = false;
    let mut letters = text.char_indices().peekable();
    for c in marked.chars() {
        if MARKS.contains(&c) {
            inside = c == OPEN;
            continue;
        }
        // Marks in the plain text are letters of a user; wrap() left them out of the marked one.
        while let Some(&(at, own)) = letters.peek().filter(|(_, l)| MARKS.contains(l)) {
            add(at, at + own.len_utf8());
            letters.next();
        }
        let (at, letter) = letters.next()?;
        if letter != c {
            return None;
        }
        if inside {
            add(at, at + letter.len_utf8());
        }
    }
    for (at, letter) in letters {
        if !MARKS.contains(&letter) {
            return None;
        }
        add(at, at + letter.len_utf8());
    }
    Some(ranges)
}

/// For templates whose output depends on more of a string than its marked rendering keeps (slices, comparisons): every
/// place where one of the user's strings stands in the text. It may take template text that reads the same for the
/// user's; it never takes the user's for the template's, unless the template changed it letter by letter.
pub fn search(text: &str, strings: &[String]) -> Vec<Range> {
    let is_tame = |s: &str| s.chars().all(|c| c.is_alphanumeric() || c.is_whitespace());
    let mut ranges = vec![];
    let mut find = |needle: &str| {
        let found = text.match_indices(needle).map(|(begin, _)| Range { begin, end: begin + needle.len() });
        let before = ranges.len();
        ranges.extend(found);
        ranges.len() > before
    };
    for string in strings {
        let string = string.trim();
        if is_tame(string) || find(string) {
            continue;
        }
        let quoted = Json::from(string).to_string();
        if find(&quoted[1..quoted.len() - 1]) {
            continue;
        }
        for line in string.lines().map(str::trim).filter(|line| !is_tame(line)) {
            find(line);
        }
    }
    crate::added::tidy(&ranges, text.len())
}

/// How freely a string was chosen: words of the protocol (roles, types, names) are compared by templates and must stay
/// as they are; anything else is marked.
#[derive(Clone, Copy, PartialEq)]
pub enum Source {
    Protocol,
    User,
}

/// Keys whose strings are free text however they look.
const FREE: [&str; 8] =
    ["content", "text", "reasoning_content", "reasoning", "thinking", "arguments", "description", "refusal"];

impl Source {
    /// The source of what lies under `key`.
    pub fn below(self, key: &str, value: &Json) -> Source {
        let free = FREE.contains(&key) && (value.is_string() || key == "arguments");
        if free || self == Source::User {
            Source::User
        } else {
            Source::Protocol
        }
    }

    pub fn marks(self, text: &str) -> bool {
        !text.is_empty() && (self == Source::User || !is_word(text))
    }
}

/// Could a template compare it to a word of its own?
pub fn is_word(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.$".contains(&b))
}
