//! How files that wait for their upload on disks of nodes (staged files) look to mounts. Knows no node and no request.

/// The start of the ETags of staged objects. The ETags of stores are hexadecimal.
pub const STAGED_ETAG: &str = "staged-";

/// The start of the ids of uploads in parts that nodes keep.
pub const STAGED_UPLOAD: &str = "staged-";

/// The metadata of an object by which a mount requests that nodes keep a new object and upload later, and by which nodes say that the
/// store does not have an object; with the value `1`. No object of a store has these.
pub const STAGE_ATTRIBUTE: &str = "spurline-stage";

/// The extended attribute with the value `1` that a file has as long as the store does not have its present version.
pub const STAGED_XATTR: &[u8] = b"user.spurline.staged";

/// Whether nodes keep the version with this ETag, bare or quoted.
pub fn is_staged_etag(etag: &str) -> bool {
    etag.trim_start_matches('"').starts_with(STAGED_ETAG)
}

/// Whether nodes keep the upload with this id, so that the store knows nothing of the upload.
pub fn is_staged_upload(id: &str) -> bool {
    id.starts_with(STAGED_UPLOAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_and_uploads_of_nodes_differ_from_those_of_stores() {
        for (etag, staged) in [
            ("staged-7-01", true),
            ("\"staged-7-01\"", true),
            ("\"9a0364b9e99bb480dd25e1f0284c8555-3\"", false),
            ("", false),
        ] {
            assert_eq!(is_staged_etag(etag), staged, "{etag}");
        }
        assert!(is_staged_upload("staged-n1-7") && !is_staged_upload("VXBsb2FkIElE"));
    }
}
