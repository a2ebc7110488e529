//! The bodies of answers: what decodes encodes to the same bytes.
#![no_main]
use libfuzzer_sys::fuzz_target;
use spurline_proto::{
    AnswerBody, CapacityAnswer, ChallengeAnswer, RangesDone, SentParts, StoreAnswer, TokenProof, UploadParts, WelcomeAnswer, WriteAnswer,
    decode_error,
};
use spurline_types::{ObjectAttr, ListPage};

fn check<T: AnswerBody>(bytes: &[u8]) {
    if let Ok(value) = T::decode(bytes) {
        let mut out = Vec::new();
        value.encode(&mut out);
        assert_eq!(out, bytes);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, body)) = bytes.split_first() else { return };
    match kind % 12 {
        0 => check::<ObjectAttr>(body),
        1 => check::<ListPage>(body),
        2 => check::<CapacityAnswer>(body),
        3 => check::<WelcomeAnswer>(body),
        4 => check::<RangesDone>(body),
        5 => check::<ChallengeAnswer>(body),
        6 => check::<TokenProof>(body),
        7 => check::<WriteAnswer>(body),
        8 => check::<StoreAnswer>(body),
        9 => check::<UploadParts>(body),
        10 => check::<SentParts>(body),
        _ => drop(decode_error(u16::from(*kind), body)),
    }
});
