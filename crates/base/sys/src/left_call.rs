//! Whether a program still waits for the call that a thread serves. Does not know the call.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static CALL_LEFT: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// `left` says for the calls of this thread, from now on, whether their program waits no more.
pub fn set_call_left(left: &Arc<AtomicBool>) {
    CALL_LEFT.set(Some(Arc::clone(left)));
}

/// Whether the program of the call that this thread serves waits no more: a signal has ended the program, and the next one may
/// have the same numbers.
pub fn is_call_left() -> bool {
    CALL_LEFT.with_borrow(|left| left.as_ref().is_some_and(|left| left.load(Ordering::Acquire)))
}
