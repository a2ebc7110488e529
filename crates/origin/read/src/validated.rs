//! What every request is checked for before anything is sent: a path inside the source, a range inside the object. Knows no kind of
//! origin.

use spurline_sys::show_path;
use spurline_types::{Error, ErrorKind, ObjectRef, Result};

/// Refuses paths that leave the source or have an empty part.
pub(crate) fn validate_path(path: &[u8]) -> Result<()> {
    let bad = !path.is_empty() && path.split(|b| *b == b'/').any(|part| matches!(part, b"" | b"." | b".."));
    if bad || path.contains(&0) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("'{}' is not a valid path: a part is empty, '.' or '..', or contains NUL", show_path(path)),
        ));
    }
    Ok(())
}

/// Refuses reads past an object's end.
pub(crate) fn validate_range(object: &ObjectRef, offset: u64, len: usize) -> Result<()> {
    match offset.checked_add(len as u64) {
        Some(end) if end <= object.size => Ok(()),
        _ => Err(Error::new(
            ErrorKind::Invalid,
            format!("a read of {len} bytes at {offset} of '{}', which has {}", show_path(&object.path), object.size),
        )),
    }
}
