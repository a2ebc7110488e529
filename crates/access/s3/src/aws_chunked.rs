//! Bodies in chunks with a line before each (`aws-chunked`), which clients send that compute a checksum or signatures while they send,
//! and the trailer after the last chunk. Signatures of chunks are not checked here: the library behind the calls decodes the bodies of
//! requests whose signatures are checked. Knows no stream.

use bytes::Bytes;
use http::header::CONTENT_ENCODING;
use http::{HeaderMap, HeaderName, HeaderValue};
use s3s::{S3Error, S3Result, TrailingHeaders, s3_error};

/// The longest line before a chunk, in bytes.
const CHUNK_LINE_MAX: usize = 1024;
/// All lines of a trailer, in bytes.
const TRAILER_MAX: usize = 16 << 10;

/// How the bytes of an object lie in the body of a request.
#[derive(Default)]
pub(crate) enum BodyFraming {
    /// The body is the object.
    #[default]
    Plain,
    /// The library has decoded the chunks, and has the trailer at the end of the body.
    Decoded(TrailingHeaders),
    Chunks(ChunkDecoder),
}

impl BodyFraming {
    /// The framing that the headers name, unless the library has decoded the body.
    pub fn of(headers: &HeaderMap, decoded: Option<TrailingHeaders>) -> BodyFraming {
        match decoded {
            Some(trailer) => BodyFraming::Decoded(trailer),
            None if names_chunks(headers) => BodyFraming::Chunks(ChunkDecoder::default()),
            None => BodyFraming::Plain,
        }
    }

    /// Takes the next bytes of the object out of `input`; `None` when `input` is used up.
    ///
    /// # Errors
    /// `InvalidRequest` for a body that is not in chunks as the headers say.
    pub fn next_piece(&mut self, input: &mut Bytes) -> S3Result<Option<Bytes>> {
        match self {
            BodyFraming::Chunks(decoder) => decoder.next_piece(input),
            _ if input.is_empty() => Ok(None),
            _ => Ok(Some(std::mem::take(input))),
        }
    }

    /// The trailer, at the end of the body.
    ///
    /// # Errors
    /// `IncompleteBody` for a body without its last chunk.
    pub fn finish(self) -> S3Result<HeaderMap> {
        match self {
            BodyFraming::Plain => Ok(HeaderMap::new()),
            BodyFraming::Decoded(trailer) => Ok(trailer.take().unwrap_or_default()),
            BodyFraming::Chunks(decoder) => decoder.finish(),
        }
    }
}

/// Whether the headers say that the body is in chunks.
pub(crate) fn names_chunks(headers: &HeaderMap) -> bool {
    let encodings = headers.get_all(CONTENT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let is_encoded =
        encodings.flat_map(|text| text.split(',')).any(|word| word.trim().eq_ignore_ascii_case("aws-chunked"));
    let digest = headers.get("x-amz-content-sha256").and_then(|value| value.to_str().ok());
    is_encoded || digest.is_some_and(|text| text.starts_with("STREAMING-"))
}

/// What comes next in the body.
#[derive(Clone, Copy, Default)]
enum ChunkState {
    /// The line before a chunk.
    #[default]
    Head,
    /// Bytes of a chunk.
    Data { left: u64 },
    /// The end of the line after a chunk.
    DataEnd,
    /// The lines after the last chunk.
    Trailer,
}

/// Decodes a body piece by piece.
#[derive(Default)]
pub(crate) struct ChunkDecoder {
    state: ChunkState,
    /// The part of a line that was received.
    line: Vec<u8>,
    trailer: HeaderMap,
    trailer_len: usize,
}

impl ChunkDecoder {
    fn next_piece(&mut self, input: &mut Bytes) -> S3Result<Option<Bytes>> {
        while !input.is_empty() {
            if let ChunkState::Data { left } = self.state {
                let len = input.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let left = left - len as u64;
                self.state = if left == 0 { ChunkState::DataEnd } else { ChunkState::Data { left } };
                return Ok(Some(input.split_to(len)));
            }
            if self.take_line(input)? {
                let line = std::mem::take(&mut self.line);
                self.read_line(line.trim_ascii_end())?;
            }
        }
        Ok(None)
    }

    /// Gathers a line; whether all of it is there.
    fn take_line(&mut self, input: &mut Bytes) -> S3Result<bool> {
        let end = input.iter().position(|byte| *byte == b'\n');
        let part = input.split_to(end.map_or(input.len(), |at| at + 1));
        self.line.extend_from_slice(&part);
        if self.line.len() > CHUNK_LINE_MAX {
            return Err(malformed("a line is too long"));
        }
        Ok(end.is_some())
    }

    fn read_line(&mut self, line: &[u8]) -> S3Result<()> {
        match self.state {
            ChunkState::Head => {
                self.state = match chunk_len(line)? {
                    0 => ChunkState::Trailer,
                    left => ChunkState::Data { left },
                };
            }
            ChunkState::DataEnd if line.is_empty() => self.state = ChunkState::Head,
            ChunkState::DataEnd | ChunkState::Data { .. } => {
                return Err(malformed("a chunk is longer than the line before it says"));
            }
            ChunkState::Trailer => self.read_trailer(line)?,
        }
        Ok(())
    }

    fn read_trailer(&mut self, line: &[u8]) -> S3Result<()> {
        if line.is_empty() {
            return Ok(());
        }
        self.trailer_len += line.len();
        if self.trailer_len > TRAILER_MAX {
            return Err(malformed("the trailer is too long"));
        }
        let no_header = || malformed("a line of the trailer is no header");
        let colon = line.iter().position(|byte| *byte == b':').ok_or_else(no_header)?;
        let name = HeaderName::from_bytes(&line[..colon]).map_err(|_| no_header())?;
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).map_err(|_| no_header())?;
        self.trailer.insert(name, value);
        Ok(())
    }

    fn finish(mut self) -> S3Result<HeaderMap> {
        if !matches!(self.state, ChunkState::Trailer) {
            return Err(s3_error!(IncompleteBody, "the body ended before its last chunk"));
        }
        // The last line may have no end.
        let line = std::mem::take(&mut self.line);
        self.read_trailer(line.trim_ascii())?;
        Ok(self.trailer)
    }
}

/// The length in the line before a chunk; a signature may follow.
fn chunk_len(line: &[u8]) -> S3Result<u64> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
    let text = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let len = text.and_then(|text| u64::from_str_radix(text, 16).ok());
    len.ok_or_else(|| malformed("a line before a chunk has no length"))
}

fn malformed(why: &str) -> S3Error {
    s3_error!(
        InvalidRequest,
        "the headers say that the body is in chunks (Content-Encoding: aws-chunked, or x-amz-content-sha256: STREAMING-...), \
         and {why}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIGNED: &[u8] =
        b"5;chunk-signature=0a\r\nhel\r\n\r\nA;chunk-signature=0b\r\n0123456789\r\n0;chunk-signature=0c\r\n\
        x-amz-checksum-crc32:AAAAAA==\r\nx-amz-trailer-signature:0d\r\n\r\n";

    fn decode(body: &[u8], piece_len: usize) -> S3Result<(Vec<u8>, HeaderMap)> {
        let mut framing = BodyFraming::Chunks(ChunkDecoder::default());
        let mut decoded = Vec::new();
        for part in body.chunks(piece_len) {
            let mut input = Bytes::copy_from_slice(part);
            while let Some(piece) = framing.next_piece(&mut input)? {
                decoded.extend_from_slice(&piece);
            }
        }
        Ok((decoded, framing.finish()?))
    }

    #[test]
    fn chunks_are_decoded_wherever_the_body_is_cut() {
        for piece_len in 1..=SIGNED.len() {
            let (decoded, trailer) = decode(SIGNED, piece_len).unwrap();
            assert_eq!(decoded, b"hel\r\n0123456789", "{piece_len}");
            assert_eq!(trailer["x-amz-checksum-crc32"], "AAAAAA==");
        }
        for empty in ["0\r\n\r\n", "0\r\n", "0;chunk-signature=0\r\n\r\n"] {
            assert_eq!(decode(empty.as_bytes(), 1).unwrap(), (Vec::new(), HeaderMap::new()));
        }
    }

    proptest! {
        #[test]
        fn any_body_is_decoded_alike_wherever_it_is_cut(
            body in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..200),
                "([0-9a-f;\r\n:x]{0,8}\r\n){0,8}".prop_map(String::into_bytes),
            ],
            piece_len in 1usize..50,
        ) {
            let whole = decode(&body, usize::MAX).ok();
            let cut = decode(&body, piece_len).ok();
            prop_assert_eq!(&whole, &cut);
            prop_assert!(whole.is_none_or(|(decoded, _)| decoded.len() < body.len()));
        }
    }

    #[test]
    fn other_bodies_are_refused() {
        let end_of_data = SIGNED.windows(2).rposition(|two| two == b"0;").unwrap();
        for len in 0..=end_of_data {
            assert!(decode(&SIGNED[..len], 7).is_err(), "{len}");
        }
        let long_line = [b'1'; CHUNK_LINE_MAX + 1];
        let long_trailer = format!("0\r\n{}", "name:value\r\n".repeat(TRAILER_MAX / 10 + 1));
        let bodies: [&[u8]; 9] = [
            b"hello world\r\n",
            b"+5\r\nhello\r\n0\r\n\r\n",
            b"\r\n",
            b"5\r\nhello world\r\n0\r\n\r\n",
            b"fffffffffffffffff\r\n",
            b"0\r\nno header\r\n",
            b"0\r\nna me:value\r\n",
            &long_line,
            long_trailer.as_bytes(),
        ];
        for body in bodies {
            assert!(decode(body, 7).is_err(), "{}", String::from_utf8_lossy(body));
        }
    }

    #[test]
    fn headers_name_the_framing() {
        let headers = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))])
        };
        assert!(names_chunks(&headers("content-encoding", "gzip, AWS-chunked")));
        assert!(names_chunks(&headers("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER")));
        assert!(!names_chunks(&headers("x-amz-content-sha256", "UNSIGNED-PAYLOAD")));
        assert!(!names_chunks(&headers("content-encoding", "gzip")));
    }
}
