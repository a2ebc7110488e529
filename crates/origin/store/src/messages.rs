//! What messages of several modules say: the innermost error, a value that no request can carry. Knows no store.

use spurline_types::{Error, ErrorKind, Result};

/// The message of the innermost error, which names the cause.
pub(crate) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// `value` without surrounding white space, such as the line break at the end of a file.
///
/// # Errors
/// `Invalid` where it contains characters that no request can carry; the message has `name`, not the value.
pub(crate) fn require_graphic(name: &str, value: &str) -> Result<String> {
    let value = value.trim();
    let odd = value.chars().position(|c| !c.is_ascii_graphic());
    if odd.is_none() && !value.is_empty() {
        return Ok(value.to_owned());
    }
    let why = match odd {
        None => "is empty".to_owned(),
        Some(at) => {
            let all = value.chars().count();
            format!("contains a character that is not visible ASCII, at position {} of {all}", at + 1)
        }
    };
    Err(Error::new(ErrorKind::Invalid, format!("{name} {why}; set it again, without line breaks, spaces and the like")))
}
