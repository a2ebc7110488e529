//! Encoding of numbers, byte strings and texts in sequence. It knows no message.

use crate::FrameError;

/// Appends values to a buffer that the caller reuses.
pub(crate) trait PutValue {
    fn put_u8(&mut self, n: u8);
    fn put_u16(&mut self, n: u16);
    fn put_u32(&mut self, n: u32);
    fn put_u64(&mut self, n: u64);
    /// A length (u32) and the bytes.
    fn put_bytes(&mut self, bytes: &[u8]);
    /// 0, or 1 and the bytes.
    fn put_option(&mut self, bytes: Option<&[u8]>);
}

impl PutValue for Vec<u8> {
    fn put_u8(&mut self, n: u8) {
        self.push(n);
    }
    fn put_u16(&mut self, n: u16) {
        self.extend_from_slice(&n.to_le_bytes());
    }
    fn put_u32(&mut self, n: u32) {
        self.extend_from_slice(&n.to_le_bytes());
    }
    fn put_u64(&mut self, n: u64) {
        self.extend_from_slice(&n.to_le_bytes());
    }
    fn put_bytes(&mut self, bytes: &[u8]) {
        // A byte string longer than u32 makes the body longer than any limit, which the frame's own check refuses.
        self.put_u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.extend_from_slice(bytes);
    }
    fn put_option(&mut self, bytes: Option<&[u8]>) {
        self.put_u8(u8::from(bytes.is_some()));
        if let Some(bytes) = bytes {
            self.put_bytes(bytes);
        }
    }
}

/// Decodes values from the front of borrowed bytes.
pub(crate) struct ByteCursor<'a>(pub &'a [u8]);

impl<'a> ByteCursor<'a> {
    pub fn take_raw(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], FrameError> {
        let (value, rest) = self.0.split_at_checked(len).ok_or(FrameError::Truncated(what))?;
        self.0 = rest;
        Ok(value)
    }
    pub fn take_array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FrameError> {
        let (value, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Truncated(what))?;
        self.0 = rest;
        Ok(*value)
    }
    pub fn take_u8(&mut self, what: &'static str) -> Result<u8, FrameError> {
        Ok(u8::from_le_bytes(self.take_array(what)?))
    }
    pub fn take_u16(&mut self, what: &'static str) -> Result<u16, FrameError> {
        Ok(u16::from_le_bytes(self.take_array(what)?))
    }
    pub fn take_u32(&mut self, what: &'static str) -> Result<u32, FrameError> {
        Ok(u32::from_le_bytes(self.take_array(what)?))
    }
    pub fn take_u64(&mut self, what: &'static str) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.take_array(what)?))
    }
    pub fn take_bytes(&mut self, what: &'static str) -> Result<&'a [u8], FrameError> {
        let len = self.take_u32(what)?;
        self.take_raw(usize::try_from(len).unwrap_or(usize::MAX), what)
    }
    pub fn take_text(&mut self, what: &'static str) -> Result<&'a str, FrameError> {
        std::str::from_utf8(self.take_bytes(what)?).map_err(|_| FrameError::NotText(what))
    }
    pub fn take_option(&mut self, what: &'static str) -> Result<Option<&'a [u8]>, FrameError> {
        match self.take_u8(what)? {
            0 => Ok(None),
            1 => self.take_bytes(what).map(Some),
            value => Err(FrameError::Value { what, value: value.into() }),
        }
    }
    /// Refuses bytes after the last value.
    pub fn expect_end(self) -> Result<(), FrameError> {
        if self.0.is_empty() { Ok(()) } else { Err(FrameError::Trailing(self.0.len())) }
    }
}
