//! The tokenizer: encoding by the reference implementation, with text of the user kept from spelling control tokens;
//! the bytes of each token; decoding through `decode`.

use crate::added::{tidy, touches, Matcher};
use crate::decode::{Decoding, Joiner};
use crate::{answer, guard, slice, text, Buf, Failure, Range};
use serde_json::Value;
use std::str::FromStr;
use tokenizers::tokenizer::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};
use tokenizers::{Token, Tokenizer as Reference};

const EXISTS: u8 = 1;
const ADDED: u8 = 2;
const SPECIAL: u8 = 4;
const CONTROL: u8 = 8;
const BYTE: u8 = 16;

pub struct Tokenizer {
    reference: Reference,
    decoding: Decoding,
    raw: Matcher,
    normalized: Matcher,
    /// Per id: flags, and where its bytes end in `bytes`.
    flags: Vec<u8>,
    ends: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tokenizer {
    pub fn load(json: &str) -> Result<Tokenizer, Failure> {
        let reference = Reference::from_str(json).map_err(|e| format!("not a tokenizer that can be read: {e}"))?;
        let value: Value = serde_json::from_str(json).map_err(|e| e.to_string())?;
        let mut decoding = Decoding::parse(&value["decoder"])?;
        // A byte-level normalizer puts the texts of normalized added tokens into the byte alphabet, too.
        let alphabet_normalizer = names_type(&value["normalizer"], "ByteLevel");

        let added = reference.get_added_vocabulary();
        let (mut raw, mut normalized) = (vec![], vec![]);
        for (&id, token) in added.get_added_tokens_decoder() {
            if !token.normalized {
                raw.push((token.content.clone(), id, token.clone()));
                continue;
            }
            let mut pattern = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = reference.get_normalizer() {
                normalizer.normalize(&mut pattern).map_err(|e| format!("its added token {:?}: {e}", token.content))?;
            }
            normalized.push((pattern.get().to_string(), id, token.clone()));
        }

        let names = reference.get_vocab(true);
        decoding.settle(names.iter().map(|(name, id)| {
            let token = added.get_added_tokens_decoder().get(id);
            (name.as_str(), token.is_some_and(|t| !(t.normalized && alphabet_normalizer)))
        }))?;
        let vocab = names.into_values().map(|id| id as usize + 1).max().unwrap_or(0);
        const MOST: usize = 1 << 24;
        if vocab > MOST {
            return Err(format!("its largest token id is {}; up to {} are supported", vocab - 1, MOST - 1));
        }
        let mut tokenizer = Tokenizer {
            raw: Matcher::new(raw)?,
            normalized: Matcher::new(normalized)?,
            flags: vec![0; vocab],
            ends: Vec::with_capacity(vocab),
            bytes: vec![],
            decoding,
            reference,
        };
        for id in 0..vocab as u32 {
            if let Some(name) = tokenizer.reference.id_to_token(id) {
                let mut flags = EXISTS;
                let mut in_alphabet = true;
                if let Some(token) = tokenizer.reference.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
                    flags |= ADDED | if token.special { SPECIAL } else { 0 };
                    flags |= if token.content.trim().is_empty() { 0 } else { CONTROL };
                    in_alphabet = token.normalized && alphabet_normalizer;
                }
                let piece = tokenizer.decoding.piece(&name, !in_alphabet, false);
                tokenizer.bytes.extend_from_slice(&piece.bytes);
                tokenizer.flags[id as usize] = flags | if piece.is_byte { BYTE } else { 0 };
            }
            tokenizer.ends.push(tokenizer.bytes.len());
        }
        Ok(tokenizer)
    }

    pub fn vocab(&self) -> usize {
        self.flags.len()
    }

    fn flags(&self, id: u32) -> u8 {
        self.flags.get(id as usize).copied().unwrap_or(0)
    }

    pub fn is_control(&self, id: u32) -> bool {
        self.flags(id) & CONTROL != 0
    }

    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        if id >= self.ends.len() {
            return &[];
        }
        &self.bytes[if id == 0 { 0 } else { self.ends[id - 1] }..self.ends[id]]
    }

    /// The bytes of the token when it opens a text.
    fn first_bytes(&self, id: u32) -> Vec<u8> {
        match self.reference.id_to_token(id) {
            Some(name) if self.decoding.first_differs() => {
                self.decoding.piece(&name, self.flags(id) & ADDED != 0, true).bytes
            }
            _ => self.bytes(id).to_vec(),
        }
    }

    pub fn encode(&self, text: &str, user: &[Range]) -> Result<Vec<u32>, Failure> {
        self.encode_inner(text, &tidy(user, text.len())).map_err(|e| format!("the text can't be tokenized: {e}"))
    }

    fn encode_inner(&self, text: &str, user: &[Range]) -> tokenizers::Result<Vec<u32>> {
        let whole_is_user = matches!(user, [r] if r.begin == 0 && r.end == text.len());
        let mut parts = match if whole_is_user { None } else { self.cut_by_reference(text, user) } {
            Some(parts) => parts,
            None => self.cut_around_user(text, user, whole_is_user)?,
        };
        if let Some(pre_tokenizer) = self.reference.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut parts)?;
        }
        let model = self.reference.get_model();
        parts.tokenize(|part| {
            if touches(part.offsets_original(), user) {
                self.tokenize_plain(part.get())
            } else {
                model.tokenize(part.get())
            }
        })?;
        let ids = parts.get_splits(OffsetReferential::Original, OffsetType::None).into_iter();
        Ok(ids.flat_map(|(_, _, tokens)| tokens.iter().flatten()).map(|token| token.id).collect())
    }

    /// The reference's cuts, or None when one of its control tokens touches text of the user.
    fn cut_by_reference(&self, text: &str, user: &[Range]) -> Option<PreTokenizedString> {
        let parts = self.reference.get_added_vocabulary().extract_and_normalize(self.reference.get_normalizer(), text);
        let forged = parts.get_splits(OffsetReferential::Original, OffsetType::Byte).into_iter().any(
            |(_, (begin, end), tokens)| {
                // A token may have swallowed blanks of the user; only its own letters count.
                let own = &text[begin..end];
                let begin = end - own.trim_start().len();
                let end = begin + own.trim().len();
                tokens.is_some() && begin < end && touches((begin, end), user)
            },
        );
        if forged {
            None
        } else {
            Some(parts)
        }
    }

    fn cut_around_user(
        &self,
        text: &str,
        user: &[Range],
        whole_is_user: bool,
    ) -> tokenizers::Result<PreTokenizedString> {
        let mut parts = PreTokenizedString::from(text);
        if !whole_is_user {
            parts.split(|_, part| Ok(self.raw.cut(part, user)))?;
        }
        if let Some(normalizer) = self.reference.get_normalizer() {
            parts.normalize(|part| normalizer.normalize(part))?;
        }
        if !whole_is_user {
            parts.split(|_, part| Ok(self.normalized.cut(part, user)))?;
        }
        Ok(parts)
    }

    /// Tokens of a word of the user. Some models know control tokens as words (unigram vocabularies list "</s>"): a word
    /// that became one is cut behind its first letter and tried again.
    fn tokenize_plain(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        let mut plain = vec![];
        for token in self.reference.get_model().tokenize(word)? {
            let (begin, end) = token.offsets;
            let source = word.get(begin..end).unwrap_or_default();
            let spelled = self.is_control(token.id) && source == token.value;
            match source.char_indices().nth(1) {
                Some((second, _)) if spelled => {
                    plain.extend(self.tokenize_plain(&source[..second])?);
                    plain.extend(self.tokenize_plain(&source[second..])?);
                }
                _ => plain.push(token),
            }
        }
        Ok(plain)
    }
}

fn names_type(json: &Value, name: &str) -> bool {
    json["type"] == name
        || json["normalizers"].as_array().is_some_and(|steps| steps.iter().any(|step| names_type(step, name)))
}

pub struct Decoder {
    /// Outlives the decoder: its owner sees to that.
    tokenizer: *const Tokenizer,
    skip_special: bool,
    is_first: bool,
    joiner: Joiner,
}

impl Decoder {
    fn push(&mut self, id: u32) -> &[u8] {
        let tokenizer = unsafe { &*self.tokenizer };
        let flags = tokenizer.flags(id);
        if flags & EXISTS == 0 || (self.skip_special && flags & SPECIAL != 0) {
            &[]
        } else if std::mem::take(&mut self.is_first) {
            self.joiner.push(&tokenizer.first_bytes(id), flags & BYTE != 0)
        } else {
            self.joiner.push(tokenizer.bytes(id), flags & BYTE != 0)
        }
    }

    fn finish(&mut self) -> &[u8] {
        self.is_first = true;
        self.joiner.finish()
    }
}

// ---- entries -----------------------------------------------------------------------------------------------------

#[no_mangle]
pub unsafe extern "C" fn mi_text_tokenizer_load(
    json: *const u8,
    size: usize,
    tokenizer: *mut *mut Tokenizer,
    out: *mut Buf,
) -> i32 {
    answer(out, || {
        let loaded = Tokenizer::load(text(json, size, "the file")?)?;
        *tokenizer = Box::into_raw(Box::new(loaded));
        Ok(vec![])
    })
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_tokenizer_free(tokenizer: *mut Tokenizer) {
    if !tokenizer.is_null() {
        drop(Box::from_raw(tokenizer));
    }
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_tokenizer_vocab(tokenizer: *const Tokenizer) -> usize {
    (*tokenizer).vocab()
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_tokenizer_token(
    tokenizer: *const Tokenizer,
    id: u32,
    size: *mut usize,
    flags: *mut u32,
) -> *const u8 {
    let bytes = (*tokenizer).bytes(id);
    *size = bytes.len();
    *flags = u32::from((*tokenizer).flags(id) & !BYTE);
    bytes.as_ptr()
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_tokenizer_id(tokenizer: *const Tokenizer, name: *const u8, size: usize) -> i32 {
    let id = std::str::from_utf8(slice(name, size)).ok().and_then(|name| (*tokenizer).reference.token_to_id(name));
    id.map_or(-1, |id| id as i32)
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_tokenizer_encode(
    tokenizer: *const Tokenizer,
    data: *const u8,
    size: usize,
    parse_special: i32,
    user: *const Range,
    num_user: usize,
    out: *mut Buf,
) -> i32 {
    answer(out, || {
        let text = text(data, size, "the text")?;
        let all = [Range { begin: 0, end: size }];
        let user = if parse_special == 0 { &all } else { slice(user, num_user) };
        let ids = (*tokenizer).encode(text, user)?;
        Ok(ids.iter().flat_map(|id| id.to_ne_bytes()).collect())
    })
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_decoder_new(tokenizer: *const Tokenizer, skip_special: i32) -> *mut Decoder {
    let joiner = Joiner::new(&(*tokenizer).decoding);
    Box::into_raw(Box::new(Decoder { tokenizer, skip_special: skip_special != 0, is_first: true, joiner }))
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_decoder_free(decoder: *mut Decoder) {
    if !decoder.is_null() {
        drop(Box::from_raw(decoder));
    }
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_decoder_push(decoder: *mut Decoder, id: u32, size: *mut usize) -> *const u8 {
    let certain = guard(|| Ok((*decoder).push(id))).unwrap_or_default();
    *size = certain.len();
    certain.as_ptr()
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_decoder_finish(decoder: *mut Decoder, size: *mut usize) -> *const u8 {
    let rest = guard(|| Ok((*decoder).finish())).unwrap_or_default();
    *size = rest.len();
    rest.as_ptr()
}
