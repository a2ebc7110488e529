//! State files, read at the start. The contents are opaque here.

use spurline_types::{Error, Result};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Reads and parses a state file; `None` without a file. A damaged file is renamed, because a person may need it, and both names
/// are logged.
///
/// # Errors
/// When the file can't be read or renamed: such a file must not be overwritten.
pub(crate) fn read_file<T>(file: &Path, understand: impl Fn(&[u8]) -> Result<T, String>) -> Result<Option<T>> {
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(state_file_error(file, "can't be read", &e)),
    };
    match understand(&text) {
        Ok(sense) => Ok(Some(sense)),
        Err(why) => {
            let aside = set_aside(file)
                .map_err(|e| state_file_error(file, &format!("is damaged ({why}) and can't be renamed"), &e))?;
            tracing::error!(
                "{} is damaged ({why}): it was renamed to {}, and this start begins without it; stop the process, repair \
                 the file and give it its old name, or remove it",
                file.display(),
                aside.display()
            );
            Ok(None)
        }
    }
}

fn state_file_error(file: &Path, what: &str, e: &io::Error) -> Error {
    let remedy = "let this user read and write it, or name another by --state-file; a start without it would lose \
                      its contents";
    let error = Error::io(format_args!("{} {what}", file.display()), e);
    Error::new(error.kind(), format!("{}; {remedy}", error.message()))
}

/// Renames a file to an unused name.
fn set_aside(file: &Path) -> io::Result<PathBuf> {
    let free = (1..=u32::MAX)
        .map(|n| {
            let mut name = file.as_os_str().to_owned();
            name.push(if n == 1 { ".spoilt".to_owned() } else { format!(".spoilt-{n}") });
            PathBuf::from(name)
        })
        .find(|aside| std::fs::symlink_metadata(aside).is_err());
    let aside = free.ok_or(ErrorKind::AlreadyExists)?;
    std::fs::rename(file, &aside)?;
    Ok(aside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(text: &[u8]) -> Result<u32, String> {
        std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or_else(|| "no number".to_owned())
    }

    #[test]
    fn what_makes_no_sense_is_kept_under_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nodes");
        assert_eq!(read_file(&file, number).unwrap(), None);
        spurline_sys::replace_file(&file, b"7", 0o600).unwrap();
        assert_eq!(read_file(&file, number).unwrap(), Some(7));
        for (spoilt, aside) in [("x", "nodes.spoilt"), ("y", "nodes.spoilt-2")] {
            std::fs::write(&file, spoilt).unwrap();
            assert_eq!(read_file(&file, number).unwrap(), None);
            assert_eq!(std::fs::read_to_string(dir.path().join(aside)).unwrap(), spoilt);
            assert!(!file.exists());
        }
    }

    #[test]
    fn what_can_not_be_read_is_an_error_with_a_remedy_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nodes");
        // A directory can't be read as a file; file permissions do not stop root.
        std::fs::create_dir(&file).unwrap();
        let error = read_file(&file, number).unwrap_err();
        assert!(error.message().contains("nodes can't be read") && error.message().contains("--state-file"), "{error}");
        assert!(file.is_dir());
    }
}
