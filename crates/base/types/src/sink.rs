//! The destination of a transfer's bytes, in order, so that the first may be used before the last has arrived.

/// A destination that is filled from the start. A committed part is never written again, so a sink may show it to readers at
/// once.
pub trait ByteSink {
    /// The unfilled rest; empty when all is filled.
    fn spare(&mut self) -> &mut [u8];
    /// Marks the first `n` bytes of [`ByteSink::spare`] as filled.
    fn commit(&mut self, n: usize);
}

/// A plain buffer as a sink.
pub struct SliceSink<'a> {
    buf: &'a mut [u8],
    filled: usize,
}

impl<'a> SliceSink<'a> {
    /// Fills `buf` from the start.
    pub fn new(buf: &'a mut [u8]) -> Self {
        SliceSink { buf, filled: 0 }
    }
    /// Number of filled bytes.
    pub fn filled(&self) -> usize {
        self.filled
    }
}

impl ByteSink for SliceSink<'_> {
    fn spare(&mut self) -> &mut [u8] {
        &mut self.buf[self.filled..]
    }
    fn commit(&mut self, n: usize) {
        self.filled = (self.filled + n).min(self.buf.len());
    }
}
