//! The checksums that the end of an upload in parts names, of the parts and of the object. Knows no request.

use crate::uploads::{BodyChecks, CHECKSUM_FIELDS, ChecksumField, StagedPart};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use s3s::dto::Checksum;
use s3s::{S3Result, s3_error};

/// Compares the checksums that a client names for a part with the checksums of the received part.
///
/// # Errors
/// `InvalidPart`.
pub(crate) fn check_part(number: i32, mut named: Checksum, known: &Checksum) -> S3Result<()> {
    let mut known = known.clone();
    for ChecksumField { name, field, .. } in CHECKSUM_FIELDS {
        let named = field(&mut named);
        if named.is_some() && named != field(&mut known) {
            return Err(s3_error!(InvalidPart, "part {number} was not uploaded with this {name}"));
        }
    }
    Ok(())
}

/// Compares the checksums of an object with the bytes of the parts, or with the checksums of the parts (`…-3`, for three parts); blocks.
///
/// # Errors
/// `BadDigest`, `InvalidRequest` for a text that is no checksum; errors of the disk.
pub(crate) fn check_object(mut named: Checksum, parts: &[StagedPart]) -> S3Result<()> {
    let mut of_bytes = Checksum::default();
    for checksum in &CHECKSUM_FIELDS {
        let Some(value) = (checksum.field)(&mut named).take() else { continue };
        checksum.check_form(value.split('-').next().unwrap_or_default())?;
        if value.contains('-') {
            check_composite(checksum, &value, parts)?;
        } else {
            *(checksum.field)(&mut of_bytes) = Some(value);
        }
    }
    let checks = BodyChecks { given: of_bytes, ..BodyChecks::default() };
    if checks.given == Checksum::default() {
        return Ok(());
    }
    let mut hasher = checks.hasher();
    for part in parts {
        part.staged.for_each_piece(&mut |piece| {
            hasher.update(piece);
            Ok(())
        })?;
    }
    checks.compare(&http::HeaderMap::new(), None, &mut hasher.finalize()).map(drop)
}

/// Compares a checksum of checksums.
fn check_composite(checksum: &ChecksumField, value: &str, parts: &[StagedPart]) -> S3Result<()> {
    let ChecksumField { name, field, .. } = checksum;
    let mut checks = BodyChecks::default();
    *field(&mut checks.given) = Some(String::new());
    let mut hasher = checks.hasher();
    for part in parts {
        let of_part = field(&mut part.checksums.clone()).take().and_then(|sum| BASE64_STANDARD.decode(sum).ok());
        let of_part = of_part.ok_or_else(|| s3_error!(InvalidRequest, "not all parts were uploaded with an {name}"))?;
        hasher.update(&of_part);
    }
    let found = field(&mut hasher.finalize()).take().unwrap_or_default();
    if value != format!("{found}-{}", parts.len()) {
        return Err(s3_error!(BadDigest, "the parts do not have the {name} of the request"));
    }
    Ok(())
}
