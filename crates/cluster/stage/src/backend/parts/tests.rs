//! The ids of uploads, and the ETags of parts.

use super::*;
use spurline_object_store::ObjectAttributes;

#[test]
fn an_upload_is_known_by_the_id() {
    let mut attributes = ObjectAttributes::with_content_type("text/plain; charset=\"ü\"");
    attributes.set("name", "värde".to_owned());
    let upload = StagedUpload::new(
        KeptAttributes::from(&attributes).marked("mark"),
        StageClass::Scratch { ttl_s: 60, quota: 9, folder: 7 },
    );
    let id = upload.to_id();
    assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'), "{id}");
    let again = StagedUpload::from_id(&id).unwrap().unwrap();
    assert_eq!((&again.id, &again.attributes, again.class), (&upload.id, &upload.attributes, upload.class));
    assert_eq!(again.attributes.mark().as_deref(), Some("mark"));
    assert!(StagedUpload::from_id("an upload of the store").unwrap().is_none());
    for unknown in [format!("{STAGED_UPLOAD}7b7d"), format!("{STAGED_UPLOAD}zz"), format!("{STAGED_UPLOAD}ü")] {
        assert_eq!(StagedUpload::from_id(&unknown).err().unwrap().error.kind(), ErrorKind::NotFound, "{unknown}");
    }
}

#[test]
fn the_etag_of_a_part_tells_where_the_bytes_lie() {
    let slice = |part: &str, from, len| Slice { part: part.to_owned(), from, len, holders: vec!["node-0".to_owned()] };
    let piece = Piece { slices: vec![slice("one", 0, 7), slice("two", 5, 3)] };
    let again = piece_of(&etag_of(&piece).unwrap()).unwrap();
    assert_eq!((again.size(), &again), (10, &piece));
    assert_eq!(piece_of("0123456789abcdef").err().unwrap().error.kind(), ErrorKind::Invalid);
}
