//! Paths of a source as programs write them, and symbolic links on the way. Knows volumes, and no file handles.

use spurline_types::{Error, ErrorKind, FileKind, ObjectAttr, Result};
use spurline_volume::Volume;
use std::time::Duration;

/// The most symbolic links of a path, as in the kernel.
const MOST_LINKS: usize = 40;

/// A path without empty parts, `.` and `..`; a leading slash is the source's root. `..` of the root is the root.
pub(crate) fn normal_path(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join(&b'/')
}

/// A name that was found: the path without links, and the attributes.
pub(crate) struct FoundPath {
    pub path: Vec<u8>,
    pub attr: ObjectAttr,
}

/// Finds `path`, through symbolic links that stay in the source, by attributes that are not older than `max_age`.
///
/// # Errors
/// `ELOOP` for too many links; `Invalid` for a link out of the source; failures of the volume.
pub(crate) fn find_path(volume: &dyn Volume, path: &[u8], max_age: Duration) -> Result<FoundPath> {
    let mut path = normal_path(path);
    for _ in 0..MOST_LINKS {
        let error = match volume.lookup_within(&path, max_age) {
            Ok(attr) if attr.kind != FileKind::Symlink => return Ok(FoundPath { path, attr }),
            Ok(_) => {
                path = link_target(volume, &path, path.len())?;
                continue;
            }
            Err(error) => error,
        };
        if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) {
            return Err(error);
        }
        let Some(end) = first_link(volume, &path) else { return Err(error) };
        path = link_target(volume, &path, end)?;
    }
    Err(Error::new(ErrorKind::Io(rustix::io::Errno::LOOP.raw_os_error()), "too many symbolic links"))
}

/// The end of the first part of `path` before the last that is a symbolic link.
fn first_link(volume: &dyn Volume, path: &[u8]) -> Option<usize> {
    let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    for end in ends {
        match volume.lookup(&path[..end]) {
            Ok(attr) if attr.kind == FileKind::Symlink => return Some(end),
            Ok(attr) if attr.kind == FileKind::Directory => {}
            _ => return None,
        }
    }
    None
}

/// `path` with the symbolic link that ends at `end` replaced by the target.
fn link_target(volume: &dyn Volume, path: &[u8], end: usize) -> Result<Vec<u8>> {
    let link = &path[..end];
    let target = volume.readlink(link)?;
    let shown = String::from_utf8_lossy(link);
    if target.starts_with(b"/") {
        let why = format!(
            "'{shown}' is a symbolic link to '{}', which is outside of the source",
            String::from_utf8_lossy(&target)
        );
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    let folder = link.iter().rposition(|byte| *byte == b'/').map_or(&[][..], |slash| &link[..slash]);
    let depth = folder.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).count() as i64;
    if leaves_folder(&target, depth) {
        let why = format!(
            "'{shown}' is a symbolic link to '{}', which is outside of the source",
            String::from_utf8_lossy(&target)
        );
        return Err(Error::new(ErrorKind::Invalid, why));
    }
    Ok(normal_path(&[folder, &target, &path[end..]].join(&b'/')))
}

/// Whether a relative target goes above the root from a folder `depth` names deep.
fn leaves_folder(target: &[u8], mut depth: i64) -> bool {
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => depth -= 1,
            _ => depth += 1,
        }
        if depth < 0 {
            return true;
        }
    }
    false
}
