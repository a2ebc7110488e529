//! The conditions of requests for an object, in the order of RFC 9110. Knows no volume.

use s3s::dto::{ETag, ETagCondition, Timestamp};
use s3s::{S3Error, S3ErrorCode, S3Result};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The conditions of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadConditions {
    pub if_match: Option<ETagCondition>,
    pub if_none_match: Option<ETagCondition>,
    pub if_modified_since: Option<Timestamp>,
    pub if_unmodified_since: Option<Timestamp>,
}

impl ReadConditions {
    /// Checks the conditions against an object.
    ///
    /// # Errors
    /// 412, or 304 for an object that the client has already.
    pub fn check(&self, etag: &str, modified: SystemTime) -> S3Result<()> {
        if let Some(wanted) = &self.if_match {
            if !names_etag(wanted, etag) {
                return Err(S3ErrorCode::PreconditionFailed.into());
            }
        } else if let Some(since) = &self.if_unmodified_since
            && is_after(modified, since)
        {
            return Err(S3ErrorCode::PreconditionFailed.into());
        }
        if let Some(known) = &self.if_none_match {
            if names_etag(known, etag) {
                return Err(not_modified(etag));
            }
        } else if let Some(since) = &self.if_modified_since
            && !is_after(modified, since)
        {
            return Err(not_modified(etag));
        }
        Ok(())
    }
}

/// Whether a condition names this version; a condition may have several etags, which the library takes for one.
pub(crate) fn names_etag(condition: &ETagCondition, etag: &str) -> bool {
    match condition {
        ETagCondition::Any => true,
        ETagCondition::ETag(wanted) => {
            let mut etags = wanted.value().split(',');
            wanted.value() == etag || etags.any(|one| one.trim().trim_start_matches("W/").trim_matches('"') == etag)
        }
    }
}

/// A time as HTTP has it.
pub(crate) fn whole_seconds(time: SystemTime) -> SystemTime {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since_epoch| since_epoch.as_secs());
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn is_after(modified: SystemTime, since: &Timestamp) -> bool {
    whole_seconds(modified) > time_of(since)
}

fn time_of(timestamp: &Timestamp) -> SystemTime {
    let mut seconds = Vec::new();
    let formatted = timestamp.format(s3s::dto::TimestampFormat::EpochSeconds, &mut seconds);
    let text = formatted.ok().and_then(|()| String::from_utf8(seconds).ok()).unwrap_or_default();
    let seconds: f64 = text.parse().unwrap_or_default();
    UNIX_EPOCH + Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn not_modified(etag: &str) -> S3Error {
    let mut error: S3Error = S3ErrorCode::NotModified.into();
    error.set_status_code(http::StatusCode::NOT_MODIFIED);
    if let Ok(value) = http::HeaderValue::try_from(format!("\"{etag}\"")) {
        error.set_headers([(http::header::ETAG, value)].into_iter().collect());
    }
    error
}

/// The etag of an answer.
pub(crate) fn strong_etag(etag: &str) -> ETag {
    ETag::Strong(etag.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn etag(value: &str) -> Option<ETagCondition> {
        Some(ETagCondition::ETag(ETag::Strong(value.to_owned())))
    }

    fn status(conditions: &ReadConditions) -> Option<u16> {
        let checked = conditions.check("e", at(100) + Duration::from_millis(700));
        checked.err().and_then(|error| error.status_code()).map(|status| status.as_u16())
    }

    #[test]
    fn conditions_have_the_order_of_the_standard() {
        let none = ReadConditions::default;
        let since = |seconds| Some(Timestamp::from(at(seconds)));
        assert_eq!(status(&none()), None);
        assert_eq!(status(&ReadConditions { if_match: etag("e"), ..none() }), None);
        assert_eq!(status(&ReadConditions { if_match: Some(ETagCondition::Any), ..none() }), None);
        assert_eq!(status(&ReadConditions { if_match: etag("f"), ..none() }), Some(412));
        assert_eq!(status(&ReadConditions { if_none_match: etag("e"), ..none() }), Some(304));
        for several in [r#"f", "e"#, r#"e", W/"f"#, r#"f", W/"e"#] {
            assert_eq!(status(&ReadConditions { if_none_match: etag(several), ..none() }), Some(304), "{several}");
            assert_eq!(status(&ReadConditions { if_match: etag(several), ..none() }), None, "{several}");
        }
        assert_eq!(status(&ReadConditions { if_none_match: etag("f"), ..none() }), None);
        // Whole seconds, since headers have no fractions.
        assert_eq!(status(&ReadConditions { if_modified_since: since(100), ..none() }), Some(304));
        assert_eq!(status(&ReadConditions { if_modified_since: since(99), ..none() }), None);
        assert_eq!(status(&ReadConditions { if_unmodified_since: since(99), ..none() }), Some(412));
        assert_eq!(status(&ReadConditions { if_unmodified_since: since(100), ..none() }), None);
        // The etag decides where a client gives both.
        let both = ReadConditions { if_match: etag("e"), if_unmodified_since: since(99), ..none() };
        assert_eq!(status(&both), None);
        let both = ReadConditions { if_none_match: etag("f"), if_modified_since: since(100), ..none() };
        assert_eq!(status(&both), None);
    }
}
