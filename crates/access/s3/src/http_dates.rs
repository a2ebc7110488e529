//! Dates in the headers of requests, in the three forms of RFC 9110. The library behind the calls reads the first form only, and S3
//! ignores a condition whose date has none of them. Knows no condition.

use http::header::{IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE};
use http::{HeaderMap, HeaderName, HeaderValue};
use std::time::SystemTime;

const DATE_HEADERS: [HeaderName; 4] = [
    IF_MODIFIED_SINCE,
    IF_UNMODIFIED_SINCE,
    HeaderName::from_static("x-amz-copy-source-if-modified-since"),
    HeaderName::from_static("x-amz-copy-source-if-unmodified-since"),
];

/// The time of a date; `None` for a text of another form.
pub(crate) fn parse_http_date(text: &str) -> Option<SystemTime> {
    httpdate::parse_http_date(text.trim()).ok()
}

/// The first form of a date; `None` for a text that is no date.
fn standard_form(value: &HeaderValue) -> Option<HeaderValue> {
    let time = value.to_str().ok().and_then(parse_http_date)?;
    HeaderValue::try_from(httpdate::fmt_http_date(time)).ok()
}

/// Whether the library reads the value as S3 does.
pub(crate) fn is_standard_date(value: &HeaderValue) -> bool {
    standard_form(value).is_some_and(|standard| standard == value)
}

/// Whether conditions have dates that the library does not read.
pub(crate) fn has_other_dates(headers: &HeaderMap) -> bool {
    DATE_HEADERS.iter().any(|name| headers.get(name).is_some_and(|value| !is_standard_date(value)))
}

/// Gives the dates of conditions their first form, and removes conditions without a date.
pub(crate) fn standardize_dates(headers: &mut HeaderMap) {
    for name in &DATE_HEADERS {
        match headers.get(name).map(standard_form) {
            Some(Some(standard)) => drop(headers.insert(name, standard)),
            Some(None) => drop(headers.remove(name)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_have_three_forms_and_others_are_ignored() {
        const STANDARD: &str = "Sun, 06 Nov 1994 08:49:37 GMT";
        for (text, expected) in [
            (STANDARD, Some(STANDARD)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", Some(STANDARD)),
            ("Sun Nov  6 08:49:37 1994", Some(STANDARD)),
            ("Sun, 06 Nov 1994 08:49:37 +0000", None),
            ("1994-11-06T08:49:37Z", None),
            ("0", None),
            ("", None),
        ] {
            let mut headers = HeaderMap::from_iter([(IF_MODIFIED_SINCE, HeaderValue::from_str(text).unwrap())]);
            assert_eq!(has_other_dates(&headers), text != STANDARD, "{text}");
            standardize_dates(&mut headers);
            assert_eq!(headers.get(IF_MODIFIED_SINCE).map(|value| value.to_str().unwrap()), expected, "{text}");
            assert!(!has_other_dates(&headers));
        }
    }
}
