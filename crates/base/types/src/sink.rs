//! Where the bytes of a transfer land, in order, so that others may use the first before the last is there.

/// A destination that is filled from its start. A part once committed is never written again, so a sink may
/// show it to readers at once.
pub trait Sink {
    /// What is still to be filled; empty when nothing is.
    fn spare(&mut self) -> &mut [u8];
    /// Says that the first `n` bytes of [`Sink::spare`] are good.
    fn commit(&mut self, n: usize);
}

/// A plain buffer as a sink.
pub struct SliceSink<'a> {
    buf: &'a mut [u8],
    filled: usize,
}

impl<'a> SliceSink<'a> {
    /// Fills `buf` from its start.
    pub fn new(buf: &'a mut [u8]) -> Self {
        SliceSink { buf, filled: 0 }
    }
    /// How many bytes are good.
    pub fn filled(&self) -> usize {
        self.filled
    }
}

impl Sink for SliceSink<'_> {
    fn spare(&mut self) -> &mut [u8] {
        &mut self.buf[self.filled..]
    }
    fn commit(&mut self, n: usize) {
        self.filled = (self.filled + n).min(self.buf.len());
    }
}
