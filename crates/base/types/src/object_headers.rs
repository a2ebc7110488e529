//! The headers that S3 stores with an object, and the extended attribute with the same headers of a file. Knows no request.

use crate::staged::STAGE_ATTRIBUTE;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The extended attribute with the headers of a file's object, as JSON. A bucket has the headers themselves in its place.
pub const OBJECT_HEADERS_XATTR: &[u8] = b"user.spurline.headers";

/// The start of the names of an object's own metadata.
pub const USER_METADATA_PREFIX: &str = "x-amz-meta-";

/// The headers about the content that are stored with an object.
pub const CONTENT_HEADERS: [&str; 6] =
    ["content-type", "content-encoding", "content-language", "content-disposition", "cache-control", "expires"];

/// Headers that are stored with an object: [`CONTENT_HEADERS`] and metadata; names in small letters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ObjectHeaders(pub BTreeMap<String, String>);

impl ObjectHeaders {
    /// Whether a header with this name, in small letters, is stored with an object.
    pub fn has_place_for(name: &str) -> bool {
        CONTENT_HEADERS.contains(&name) || name.starts_with(USER_METADATA_PREFIX)
    }

    /// The headers in the value of the extended attribute; `None` for a value that is none.
    pub fn from_xattr(value: &[u8]) -> Option<ObjectHeaders> {
        let headers: ObjectHeaders = serde_json::from_slice(value).ok()?;
        headers.0.keys().all(|name| ObjectHeaders::has_place_for(name)).then_some(headers)
    }

    /// The value of the extended attribute.
    pub fn to_xattr(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Takes the note of nodes away that the store does not have the object, and says whether there was such a note.
    pub fn take_staged(&mut self) -> bool {
        let name = format!("{USER_METADATA_PREFIX}{STAGE_ATTRIBUTE}");
        self.0.remove(&name).is_some_and(|value| value == "1")
    }

    /// The names of the metadata, without the start, and the values.
    pub fn user_metadata(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = self.0.iter().map(|(name, value)| (name.strip_prefix(USER_METADATA_PREFIX), value.as_str()));
        named.filter_map(|(name, value)| Some((name?, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_carry_stored_headers_only() {
        let headers = [("content-type", "text/x"), ("x-amz-meta-a", "1")];
        let headers = ObjectHeaders(headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        assert_eq!(ObjectHeaders::from_xattr(&headers.to_xattr()), Some(headers.clone()));
        assert_eq!(headers.user_metadata().collect::<Vec<_>>(), [("a", "1")]);
        let mut staged = headers.clone();
        staged.0.insert("x-amz-meta-spurline-stage".to_owned(), "1".to_owned());
        assert!(staged.take_staged() && !staged.take_staged());
        assert_eq!(staged, headers);
        for wrong in [&b""[..], b"{", b"[]", br#"{"host":"x"}"#, br#"{"content-type":1}"#, b"\xff"] {
            assert_eq!(ObjectHeaders::from_xattr(wrong), None);
        }
    }
}
