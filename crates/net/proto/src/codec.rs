//! Numbers, byte strings and texts, one after the other. It knows no message.

use crate::FrameError;

/// Appends values to a buffer that the caller reuses.
pub(crate) trait Put {
    fn put_u8(&mut self, n: u8);
    fn put_u16(&mut self, n: u16);
    fn put_u32(&mut self, n: u32);
    fn put_u64(&mut self, n: u64);
    /// A length (u32) and the bytes.
    fn put_bytes(&mut self, bytes: &[u8]);
    /// 0, or 1 and the bytes.
    fn put_option(&mut self, bytes: Option<&[u8]>);
}

impl Put for Vec<u8> {
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

/// Takes values from the front of borrowed bytes.
pub(crate) struct Take<'a>(pub &'a [u8]);

impl<'a> Take<'a> {
    pub fn raw(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], FrameError> {
        let (value, rest) = self.0.split_at_checked(len).ok_or(FrameError::Truncated(what))?;
        self.0 = rest;
        Ok(value)
    }
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FrameError> {
        let (value, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Truncated(what))?;
        self.0 = rest;
        Ok(*value)
    }
    pub fn u8(&mut self, what: &'static str) -> Result<u8, FrameError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }
    pub fn u16(&mut self, what: &'static str) -> Result<u16, FrameError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }
    pub fn u32(&mut self, what: &'static str) -> Result<u32, FrameError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }
    pub fn u64(&mut self, what: &'static str) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }
    pub fn bytes(&mut self, what: &'static str) -> Result<&'a [u8], FrameError> {
        let len = self.u32(what)?;
        self.raw(usize::try_from(len).unwrap_or(usize::MAX), what)
    }
    pub fn text(&mut self, what: &'static str) -> Result<&'a str, FrameError> {
        std::str::from_utf8(self.bytes(what)?).map_err(|_| FrameError::NotText(what))
    }
    pub fn option(&mut self, what: &'static str) -> Result<Option<&'a [u8]>, FrameError> {
        match self.u8(what)? {
            0 => Ok(None),
            1 => self.bytes(what).map(Some),
            value => Err(FrameError::Value { what, value: value.into() }),
        }
    }
    /// Refuses bytes after the last value.
    pub fn end(self) -> Result<(), FrameError> {
        if self.0.is_empty() { Ok(()) } else { Err(FrameError::Trailing(self.0.len())) }
    }
}
