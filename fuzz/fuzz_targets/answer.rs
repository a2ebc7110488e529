//! The bodies of answers: what decodes encodes to the same bytes.
#![no_main]
use libfuzzer_sys::fuzz_target;
use spurline_proto::{Body, Challenged, PartsDone, Proof, StatFs, Welcome, decode_error};
use spurline_types::{Attr, ListPage};

fn check<T: Body>(bytes: &[u8]) {
    if let Ok(value) = T::decode(bytes) {
        let mut out = Vec::new();
        value.encode(&mut out);
        assert_eq!(out, bytes);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, body)) = bytes.split_first() else { return };
    match kind % 8 {
        0 => check::<Attr>(body),
        1 => check::<ListPage>(body),
        2 => check::<StatFs>(body),
        3 => check::<Welcome>(body),
        4 => check::<PartsDone>(body),
        5 => check::<Challenged>(body),
        6 => check::<Proof>(body),
        _ => drop(decode_error(u16::from(*kind), body)),
    }
});
