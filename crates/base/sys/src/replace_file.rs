//! Replaces a file as a whole: after a crash or a loss of power the file has the old text or the new text.

use std::ffi::OsString;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Replaces `file` by `text`, with the permission bits `mode`, in a directory that exists. The text is written to another file
/// there and synced before that file takes the name; then the directory is synced.
///
/// # Errors
/// The system's error. The file has the old text then, or the new text when only the directory could not be synced.
pub fn replace_file(file: &Path, text: &[u8], mode: u32) -> io::Result<()> {
    let new = path_of_new(file)?;
    let written = write_synced(&new, text, mode).and_then(|()| std::fs::rename(&new, file));
    if let Err(error) = written {
        // The first error counts.
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match File::open(folder)?.sync_all() {
        // The file system syncs no directories.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result,
    }
}

/// The name begins with a dot and has another extension, so that programs which read all files of the directory, as systemd,
/// modprobe and container runtimes do, ignore the file. The name is unique, so that two threads can replace the same file.
fn path_of_new(file: &Path) -> io::Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = file.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut new = OsString::from(".");
    new.push(name);
    new.push(format!(".{}-{}.new", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    Ok(file.with_file_name(new))
}

fn write_synced(new: &Path, text: &[u8], mode: u32) -> io::Result<()> {
    let mut out = OpenOptions::new().write(true).create(true).truncate(true).mode(mode & 0o600).open(new)?;
    // The umask may have removed some.
    out.set_permissions(Permissions::from_mode(mode))?;
    out.write_all(text)?;
    out.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_file_has_the_new_text_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("state.json");
        for (text, mode) in [("one", 0o600), ("two", 0o644), ("", 0o400), ("three", 0o600)] {
            replace_file(&file, text.as_bytes(), mode).unwrap();
            let bits = fs::metadata(&file).unwrap().permissions().mode() & 0o7777;
            assert_eq!((fs::read_to_string(&file).unwrap().as_str(), bits), (text, mode));
        }
        let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["state.json"]);
    }

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).unwrap();
        assert!(replace_file(&folder, b"text", 0o600).is_err(), "a folder is not replaced by a file");
        assert!(replace_file(&folder.join("none/file"), b"text", 0o600).is_err());
        assert!(replace_file(Path::new("/"), b"text", 0o600).is_err());
        let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["folder"]);
    }
}
