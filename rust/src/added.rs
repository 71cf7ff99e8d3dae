//! Finds the added tokens that template text may spell, while text of the user may not. The reference cuts a text at
//! every added token it finds; this is the same cutting with one more rule (no cut may touch a user range), used for
//! the texts in which the reference's own cuts would touch one.

use crate::Range;
use aho_corasick::{AhoCorasick, MatchKind};
use regex::Regex;
use std::sync::LazyLock;
use tokenizers::normalizer::Range as Span;
use tokenizers::{AddedToken, NormalizedString, Token};

/// One of the two sets of a tokenizer: tokens matched before normalization, or after it.
pub struct Matcher {
    automaton: AhoCorasick,
    tokens: Vec<(u32, AddedToken)>,
}

fn is_word(letter: Option<char>) -> bool {
    static WORD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\w").expect("a constant"));
    letter.is_some_and(|c| WORD.is_match(c.encode_utf8(&mut [0; 4])))
}

struct Found {
    begin: usize,
    end: usize,
    token: usize,
}

impl Matcher {
    /// `tokens`: the text to look for, the id, and the flags.
    pub fn new(tokens: Vec<(String, u32, AddedToken)>) -> Result<Matcher, crate::Failure> {
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .build(tokens.iter().map(|t| &t.0))
            .map_err(|e| format!("its added tokens can't be searched for: {e}"))?;
        Ok(Matcher { automaton, tokens: tokens.into_iter().map(|(_, id, token)| (id, token)).collect() })
    }

    /// Cuts `text` at the tokens found outside the user ranges (in bytes of the whole original text; sorted, disjoint).
    pub fn cut(&self, text: NormalizedString, user: &[Range]) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
        let part = |begin, end| text.slice(Span::Normalized(begin..end)).expect("cuts lie on character borders");
        let sentence = text.get();
        let mut found: Vec<Found> = self
            .automaton
            .find_overlapping_iter(sentence)
            .map(|m| Found { begin: m.start(), end: m.end(), token: m.pattern().as_usize() })
            .filter(|m| !touches(part(m.begin, m.end).offsets_original(), user))
            .collect();
        // As the reference chooses: leftmost first, the longest of those that begin together.
        found.sort_by_key(|m| (m.begin, std::cmp::Reverse(m.end)));

        let mut parts = vec![];
        let mut done = 0; // everything before is in `parts`
        let mut taken = 0; // end of the last match, with or without the blanks it strips
        for m in found {
            if m.begin < taken {
                continue;
            }
            taken = m.end;
            let (id, token) = &self.tokens[m.token];
            let (before, after) = (&sentence[..m.begin], &sentence[m.end..]);
            if token.single_word && (is_word(before.chars().next_back()) || is_word(after.chars().next())) {
                continue;
            }
            let begin = if token.lstrip { before.trim_end().len().max(done) } else { m.begin };
            let end = if token.rstrip { sentence.len() - after.trim_start().len() } else { m.end };
            if done < begin {
                parts.push((part(done, begin), None));
            }
            let value = part(begin, end);
            let tokens = vec![Token::new(*id, value.get().to_string(), (0, end - begin))];
            parts.push((value, Some(tokens)));
            done = end;
        }
        if done < sentence.len() {
            parts.push((part(done, sentence.len()), None));
        }
        parts
    }
}

/// Does [begin, end) overlap one of the sorted, disjoint ranges?
pub fn touches((begin, end): (usize, usize), ranges: &[Range]) -> bool {
    let first = ranges.partition_point(|r| r.end <= begin);
    ranges.get(first).is_some_and(|r| r.begin < end)
}

/// Sorted, disjoint, inside [0, len), without empty ones.
pub fn tidy(ranges: &[Range], len: usize) -> Vec<Range> {
    let mut ranges: Vec<Range> =
        ranges.iter().map(|r| Range { begin: r.begin, end: r.end.min(len) }).filter(|r| r.begin < r.end).collect();
    ranges.sort_by_key(|r| r.begin);
    let mut tidy: Vec<Range> = vec![];
    for range in ranges {
        match tidy.last_mut() {
            Some(last) if range.begin <= last.end => last.end = last.end.max(range.end),
            _ => tidy.push(range),
        }
    }
    tidy
}
