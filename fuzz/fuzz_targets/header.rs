//! A header: no bytes make the decoder or the checks panic, and what decodes encodes to the same fields.
#![no_main]
use libfuzzer_sys::fuzz_target;
use spurline_proto::FrameHeader;

fuzz_target!(|bytes: &[u8]| {
    let _ = FrameHeader::check_start(bytes);
    if let Some(Ok(header)) = bytes.first_chunk().map(FrameHeader::decode) {
        let _ = header.check_request();
        let _ = header.check_answer(header.op, header.id);
        assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    }
});
