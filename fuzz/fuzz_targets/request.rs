//! The body of a request: the first two bytes choose the operation; what decodes encodes to the same bytes.
#![no_main]
use libfuzzer_sys::fuzz_target;
use spurline_proto::{HEADER_LEN, FrameOp, NodeRequest};

fuzz_target!(|bytes: &[u8]| {
    let Some((op, body)) = bytes.split_first_chunk::<2>() else { return };
    if let Ok(request) = NodeRequest::decode(FrameOp::from_code(u16::from_le_bytes(*op)), body) {
        let mut out = Vec::new();
        if request.encode(1, &mut out).is_ok() {
            assert_eq!(&out[HEADER_LEN..HEADER_LEN + body.len()], body);
        }
    }
});
