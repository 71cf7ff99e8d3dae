//! The Rust part of metainfer's text room, behind the C header `include/mi_text.h` (which documents every call).
//! This file holds what all entries share: buffers, arguments, and the net that turns a panic into an error.

mod added;
mod decode;
mod grammar;
mod grammar_words;
mod marks;
mod methods;
mod python;
mod template;
mod tokenizer;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::RefCell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe, PanicHookInfo};
use std::sync::Once;

/// Without memory the process ends as where C++ finds none, with one sentence and exit code 3: Rust itself would abort.
struct OrEnd;

unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        found(System.alloc(layout))
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        found(System.alloc_zeroed(layout))
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        found(System.realloc(at, layout, size))
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        System.dealloc(at, layout)
    }
}

#[global_allocator]
static ALLOCATOR: OrEnd = OrEnd;

unsafe fn found(at: *mut u8) -> *mut u8 {
    if at.is_null() {
        let text = b"error: out of memory\n";
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
        libc::_exit(3);
    }
    at
}

/// Why a call failed, as one sentence.
pub type Failure = String;

#[repr(C)]
pub struct Buf {
    data: *mut u8,
    size: usize,
    capacity: usize,
}

impl Buf {
    fn new(bytes: Vec<u8>) -> Buf {
        let mut bytes = std::mem::ManuallyDrop::new(bytes);
        Buf { data: bytes.as_mut_ptr(), size: bytes.len(), capacity: bytes.capacity() }
    }
}

#[no_mangle]
pub unsafe extern "C" fn mi_text_buf_free(buf: *mut Buf) {
    let buf = &mut *buf;
    if buf.capacity != 0 {
        drop(Vec::from_raw_parts(buf.data, buf.size, buf.capacity));
    }
    *buf = Buf { data: std::ptr::null_mut(), size: 0, capacity: 0 };
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Range {
    pub begin: usize,
    pub end: usize,
}

/// A slice from a C pointer and length; a null pointer is an empty slice.
pub(crate) unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(data, len)
    }
}

pub(crate) unsafe fn text<'a>(data: *const u8, len: usize, what: &str) -> Result<&'a str, Failure> {
    std::str::from_utf8(slice(data, len)).map_err(|e| format!("{what} is not valid UTF-8 (byte {})", e.valid_up_to()))
}

/// The last panic of this thread: the source file that it began in, and its words.
struct Panic {
    file: String,
    text: String,
}

thread_local! {
    static PANIC: RefCell<Option<Panic>> = const { RefCell::new(None) };
}

fn note_panic(info: &PanicHookInfo) {
    let payload = info.payload();
    let words = payload.downcast_ref::<&str>().copied();
    let text = words.or(payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason given");
    let file = info.location().map_or("", |at| at.file());
    let noted = Panic { file: file.to_string(), text: text.replace('\n', " ") };
    PANIC.with(|p| *p.borrow_mut() = Some(noted));
}

/// Runs `f`; a panic in it is a Failure. The panic's text goes into the message instead of to stderr.
pub(crate) fn guard<T>(f: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(Box::new(note_panic)));
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| {
        let Panic { file, text } = PANIC.take().unwrap_or(Panic { file: String::new(), text: String::new() });
        Err(format!("internal error of the text library: {text} ({file})"))
    })
}

/// Runs `f` within `guard`; a panic that begins in the sources of `library` is a Failure with its words alone, for where
/// the input, not this program, made the library stop. Any other panic goes on.
pub(crate) fn guard_library<T>(library: &str, f: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|panic| {
        match PANIC.with(|p| p.borrow_mut().take_if(|p| p.file.contains(library))) {
            Some(theirs) => theirs.text,
            None => resume_unwind(panic),
        }
    })
}

/// The common end of an entry: on success `out` is filled with the bytes, otherwise with the message.
pub(crate) unsafe fn answer(out: *mut Buf, f: impl FnOnce() -> Result<Vec<u8>, Failure>) -> i32 {
    let (bytes, code) = match guard(f) {
        Ok(bytes) => (bytes, 0),
        Err(message) => (message.into_bytes(), 1),
    };
    *out = Buf::new(bytes);
    code
}
