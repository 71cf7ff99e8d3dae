/* The C face of the Rust library mi_text: tokenizers, chat templates, grammars.
 *
 * Handles are opaque. A tokenizer, a template and a grammar factory are immutable and may be used from many threads at
 * once; a decoder and a matcher belong to one thread at a time.
 * Text is UTF-8 with a length, not terminated; input that is not UTF-8 is an error.
 * Functions that can fail return 0 when they succeeded. Otherwise they return 1 and `out` holds one sentence that says
 * why. An mi_text_buf is owned by the library until mi_text_buf_free; a zeroed one is empty, and every call that fills
 * one replaces (does not free) what was in it. No call ends the process: a panic inside becomes an error of the call.
 */
#ifndef MI_TEXT_H_
#define MI_TEXT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes, or as many elements as size / sizeof(element) where a call says what it holds. */
typedef struct mi_text_buf {
  uint8_t* data;
  size_t size;
  size_t capacity;
} mi_text_buf;
void mi_text_buf_free(mi_text_buf* buf);

typedef struct mi_text_range {
  size_t begin, end; /* bytes */
} mi_text_range;

/* ---- tokenizer ---------------------------------------------------------------------------------------------- */
typedef struct mi_text_tokenizer mi_text_tokenizer;
enum {
  MI_TEXT_TOKEN_EXISTS = 1,
  MI_TEXT_TOKEN_ADDED = 2,   /* listed in added_tokens */
  MI_TEXT_TOKEN_SPECIAL = 4, /* ... and marked special: left out by skip_special */
  MI_TEXT_TOKEN_CONTROL = 8, /* ... or not, but more than white space: never produced by plain text */
};

/* From the bytes of a tokenizer.json. Its truncation and padding are ignored. */
int mi_text_tokenizer_load(const char* json, size_t size, mi_text_tokenizer** tokenizer, mi_text_buf* out);
void mi_text_tokenizer_free(mi_text_tokenizer* tokenizer);
/* Largest id + 1. */
size_t mi_text_tokenizer_vocab(const mi_text_tokenizer* tokenizer);
/* The bytes of a token, owned by the tokenizer; *flags as above (0: no such id). */
const uint8_t* mi_text_tokenizer_token(const mi_text_tokenizer* tokenizer, uint32_t id, size_t* size, uint32_t* flags);
/* The id of a token by its name in the file, or -1. */
int32_t mi_text_tokenizer_id(const mi_text_tokenizer* tokenizer, const char* name, size_t size);
/* out: uint32_t ids. Added tokens spelled in `text` become their ids, except where they would touch one of the user
 * ranges; parse_special 0 is the same as one range over the whole text. Nothing is added at the ends. */
int mi_text_tokenizer_encode(const mi_text_tokenizer* tokenizer, const char* text, size_t size, int parse_special,
                             const mi_text_range* user, size_t num_user, mi_text_buf* out);

/* Ids to text, piece by piece. Unknown ids stand for nothing. */
typedef struct mi_text_decoder mi_text_decoder;
mi_text_decoder* mi_text_decoder_new(const mi_text_tokenizer* tokenizer, int skip_special); /* the tokenizer must outlive it */
void mi_text_decoder_free(mi_text_decoder* decoder);
/* The text that became certain; it stays valid until the next call with this decoder. */
const uint8_t* mi_text_decoder_push(mi_text_decoder* decoder, uint32_t id, size_t* size);
/* What was held back, unfinished characters as U+FFFD; the decoder then starts anew. */
const uint8_t* mi_text_decoder_finish(mi_text_decoder* decoder, size_t* size);

/* ---- chat template ------------------------------------------------------------------------------------------ */
typedef struct mi_text_template mi_text_template;
/* `variables`: a JSON object of what every rendering sees (bos_token and the like). */
int mi_text_template_compile(const char* source, size_t size, const char* variables, size_t variables_size,
                             mi_text_template** tmpl, mi_text_buf* out);
void mi_text_template_free(mi_text_template* tmpl);
/* messages and tools: JSON arrays (tools may be empty text); extra: a JSON object of further variables, or empty text.
 * out: the prompt. user: mi_text_range elements, sorted and disjoint: the bytes of the prompt that came from messages,
 * tools and extra (free text of them; words like roles and type names count as the template's). */
int mi_text_template_render(const mi_text_template* tmpl, const char* messages, size_t messages_size, const char* tools,
                            size_t tools_size, const char* extra, size_t extra_size, int add_generation_prompt,
                            mi_text_buf* user, mi_text_buf* out);

/* ---- grammars ----------------------------------------------------------------------------------------------- */
typedef struct mi_text_grammars mi_text_grammars;
/* For a model with `vocab` logits and these end tokens. Needs the tokenizer during the call only. */
int mi_text_grammars_new(const mi_text_tokenizer* tokenizer, const uint32_t* ends, size_t num_ends, size_t vocab,
                         mi_text_grammars** grammars, mi_text_buf* out);
void mi_text_grammars_free(mi_text_grammars* grammars);

typedef struct mi_text_matcher mi_text_matcher;
/* kind: "json_schema", "regex" or "lark". */
int mi_text_matcher_new(const mi_text_grammars* grammars, const char* kind, size_t kind_size, const char* grammar,
                        size_t size, mi_text_matcher** matcher, mi_text_buf* out);
void mi_text_matcher_free(mi_text_matcher* matcher);
mi_text_matcher* mi_text_matcher_clone(const mi_text_matcher* matcher); /* null when out of memory or state */
/* Bit i of mask: token i may come next. Returns 0 when generation must stop (then only the end tokens are set). */
int mi_text_matcher_fill(mi_text_matcher* matcher, uint32_t* mask, size_t words);
/* 1 and the reason, if generation stopped because the grammar cannot be followed: a limit, or no token that fits. */
int mi_text_matcher_failure(const mi_text_matcher* matcher, mi_text_buf* out);
int mi_text_matcher_accept(mi_text_matcher* matcher, uint32_t token, mi_text_buf* out);
/* 1: nothing but an end token can follow. */
int mi_text_matcher_finished(const mi_text_matcher* matcher);

#ifdef __cplusplus
}
#endif
#endif
