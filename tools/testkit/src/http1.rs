//! The part of HTTP/1.1 that a proxy needs: heads, lengths, chunks. Deliberately understands only the headers that determine a
//! body's length.

use std::io::{self, BufRead, Read, Write};

/// Greatest length of a head.
const MAX_HEAD: u64 = 64 << 10;

/// The head of a request or an answer, unchanged.
pub(crate) struct HttpHead {
    pub raw: Vec<u8>,
    pub first: String,
    pub length: Option<u64>,
    pub chunked: bool,
    pub close: bool,
}

impl HttpHead {
    /// Reads a head; `None` when the peer closed the connection before.
    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Option<HttpHead>> {
        let mut head = HttpHead { raw: Vec::new(), first: String::new(), length: None, chunked: false, close: false };
        let mut from = from.take(MAX_HEAD);
        loop {
            let start = head.raw.len();
            if from.read_until(b'\n', &mut head.raw)? == 0 {
                return if start == 0 { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            let line = String::from_utf8_lossy(&head.raw[start..]).trim_end().to_owned();
            if start == 0 {
                head.first = line;
            } else if line.is_empty() {
                return Ok(Some(head));
            } else if let Some((name, value)) = line.split_once(':') {
                let value = value.trim();
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => head.length = value.parse().ok(),
                    "transfer-encoding" => head.chunked = value.eq_ignore_ascii_case("chunked"),
                    "connection" => head.close = value.eq_ignore_ascii_case("close"),
                    _ => {}
                }
            }
        }
    }

    /// The n-th word of the first line.
    pub(crate) fn word(&self, n: usize) -> &str {
        self.first.split(' ').nth(n).unwrap_or_default()
    }

    /// Whether an answer to `method` with this head has a body.
    pub(crate) fn has_body(&self, method: &str) -> bool {
        method != "HEAD" && !matches!(self.word(1), "204" | "304") && (self.chunked || self.length != Some(0))
    }
}

/// Forwards a body of `head`. Before each piece, `gate(n)` returns how many of the `n` bytes to forward; fewer than `n` end the
/// forwarding. Returns whether the whole body was forwarded.
pub(crate) fn relay_body(
    head: &HttpHead,
    from: &mut impl BufRead,
    to: &mut impl Write,
    mut gate: impl FnMut(u64) -> u64,
) -> io::Result<bool> {
    let mut buffer = vec![0; 64 << 10];
    let mut copy = |mut left: u64, from: &mut dyn BufRead, to: &mut dyn Write, counted: bool| -> io::Result<bool> {
        while left > 0 {
            let want = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let n = from.read(&mut buffer[..want])?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let allowed = if counted { gate(n as u64) } else { n as u64 } as usize;
            to.write_all(&buffer[..allowed.min(n)])?;
            if allowed < n {
                to.flush()?;
                return Ok(false);
            }
            left -= n as u64;
        }
        Ok(true)
    };
    if !head.chunked {
        return match head.length {
            Some(length) => copy(length, from, to, true),
            None => Err(io::Error::other("a body without a length")),
        };
    }
    loop {
        let mut line = Vec::new();
        from.read_until(b'\n', &mut line)?;
        let text = String::from_utf8_lossy(&line).trim().to_owned();
        let size = u64::from_str_radix(text.split(';').next().unwrap_or_default(), 16);
        let size = size.map_err(|_| io::Error::other("a chunk without a size"))?;
        to.write_all(&line)?;
        if !copy(size, from, to, true)? {
            return Ok(false);
        }
        copy(2, from, to, false)?;
        if size == 0 {
            return Ok(true);
        }
    }
}
