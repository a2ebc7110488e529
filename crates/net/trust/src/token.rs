//! The group token: read from a file and checked for minimal strength. Knows no proof.

use aws_lc_rs::hmac;
use spurline_types::{Error, ErrorKind, Result};
use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The shortest token: 128 bits in base64, more in hexadecimal.
const MIN_LENGTH: usize = 22;
/// The minimum number of different bytes; a random token of this length misses that once in millions.
const MIN_DIFFERENT: usize = 8;
/// The longest line accepted as a token.
const MAX_LENGTH: usize = 1024;
/// Limit of simultaneous tokens: an old token, a new token, and some spare.
const MAX_TOKENS: usize = 8;
/// The longest accepted file.
const MAX_FILE: u64 = 64 << 10;

/// How to make a good token, for messages.
const HOW_TO_MAKE: &str = "make one with: (umask 077; openssl rand -base64 32 > FILE)";

/// The secrets of a group: all are accepted, the first is used for proofs. No secret is ever printed.
pub struct GroupTokens {
    pub(crate) keys: Vec<hmac::Key>,
    /// A problem of the file that is no reason to stop.
    warning: Option<String>,
}

impl fmt::Debug for GroupTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} token(s)", self.keys.len())
    }
}

impl GroupTokens {
    /// Reads a file with a token in each line; the first is used for proofs, all are accepted.
    ///
    /// # Errors
    /// `NotFound` or `PermissionDenied` when the file can't be read, `Invalid` when every user may change it, or a line is no
    /// valid secret.
    pub fn read_file(file: &Path) -> Result<GroupTokens> {
        let shown = format!("--group-token-file {}", file.display());
        let wrong = |why: String| Error::new(ErrorKind::Invalid, format!("{shown}: {why}"));
        let io = |e: &std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => {
                let why = format!(
                    "{shown}: there is no such file; {HOW_TO_MAKE}, and give every member of the group that file"
                );
                Error::new(ErrorKind::NotFound, why)
            }
            std::io::ErrorKind::PermissionDenied => {
                let why = format!("{shown}: this user may not read it; chown it to the user of this process");
                Error::new(ErrorKind::PermissionDenied, why)
            }
            _ => wrong(format!("it can't be read: {e}")),
        };
        let mut opened = std::fs::File::open(file).map_err(|e| io(&e))?;
        let meta = opened.metadata().map_err(|e| io(&e))?;
        if !meta.is_file() {
            return Err(wrong("it is no file".into()));
        }
        let mode = meta.permissions().mode();
        if mode & 0o002 != 0 {
            return Err(wrong(format!(
                "every user of this host may change it (mode {:o}); chmod 600 {}",
                mode & 0o777,
                file.display()
            )));
        }
        let mut bytes = Vec::new();
        (&mut opened).take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|e| io(&e))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(wrong(format!("it has more than {MAX_FILE} bytes: that is no token; {HOW_TO_MAKE}")));
        }
        let mut tokens = GroupTokens::parse(&bytes).map_err(wrong)?;
        // Not refused: secrets mounted into containers are readable by all inside unless configured otherwise.
        if mode & 0o004 != 0 {
            tokens.warning = Some(format!(
                "{shown}: every user of this host can read it (mode {:o}) and so join the group; chmod 600 {}",
                mode & 0o777,
                file.display()
            ));
        }
        Ok(tokens)
    }

    /// The tokens in `bytes`, a token in each line, without surrounding spaces and empty lines.
    ///
    /// # Errors
    /// The fault, without the token.
    pub fn parse(bytes: &[u8]) -> Result<GroupTokens, String> {
        let mut lines: Vec<&[u8]> = Vec::new();
        for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() || lines.contains(&line) {
                continue;
            }
            let number = number + 1;
            let mut seen = [false; 256];
            line.iter().for_each(|byte| seen[usize::from(*byte)] = true);
            let different = seen.iter().filter(|seen| **seen).count();
            if line.len() < MIN_LENGTH {
                let len = line.len();
                return Err(format!("line {number} has {len} bytes, a token has {MIN_LENGTH} or more; {HOW_TO_MAKE}"));
            }
            if line.len() > MAX_LENGTH {
                return Err(format!(
                    "line {number} is longer than {MAX_LENGTH} bytes: that is no token; {HOW_TO_MAKE}"
                ));
            }
            if different < MIN_DIFFERENT {
                return Err(format!(
                    "line {number} is made of {different} different characters and can be guessed; {HOW_TO_MAKE}"
                ));
            }
            lines.push(line);
        }
        if lines.is_empty() {
            return Err(format!("it holds no token; {HOW_TO_MAKE}"));
        }
        if lines.len() > MAX_TOKENS {
            return Err(format!("it holds {} tokens, at most {MAX_TOKENS} at a time are accepted", lines.len()));
        }
        let keys = lines.into_iter().map(|line| hmac::Key::new(hmac::HMAC_SHA256, line)).collect();
        Ok(GroupTokens { keys, warning: None })
    }

    /// A warning about the file, for people.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Number of tokens.
    pub fn count(&self) -> usize {
        self.keys.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};

    const GOOD: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";

    #[test]
    fn lines_are_tokens_and_bad_ones_say_why() {
        assert_eq!(GroupTokens::parse(format!("{GOOD}\r\n\n  {GOOD}2 \n{GOOD}").as_bytes()).unwrap().count(), 2);
        for (bytes, why) in [
            (String::new(), "holds no token"),
            (" \n\n".into(), "holds no token"),
            ("secret\n".into(), "line 1 has 6 bytes"),
            (format!("{GOOD}\nshort"), "line 2 has 5 bytes"),
            ("ab".repeat(40), "2 different characters"),
            (GOOD.repeat(60), "longer than"),
            ((0..9).map(|n| format!("{GOOD}{n}\n")).collect(), "9 tokens"),
        ] {
            let said = GroupTokens::parse(bytes.as_bytes()).unwrap_err();
            assert!(said.contains(why), "{said}");
            assert!(!said.contains(GOOD) && !said.contains("secret"), "a secret is shown: {said}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic_and_no_error_shows_them(bytes: Vec<u8>, line in "[ -~]{0,40}") {
            for bytes in [&bytes[..], line.as_bytes(), &[line.as_bytes(), b"\n", &bytes].concat()] {
                match GroupTokens::parse(bytes) {
                    Ok(tokens) => assert!((1..=MAX_TOKENS).contains(&tokens.count())),
                    Err(said) => assert!(said.contains(HOW_TO_MAKE) || said.contains("at a time"), "{said}"),
                }
            }
        }
    }

    #[test]
    fn a_file_is_checked_for_who_may_touch_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        assert_eq!(GroupTokens::read_file(&file).unwrap_err().kind(), ErrorKind::NotFound);
        fs::write(&file, format!("{GOOD}\n")).unwrap();
        let with = |mode| {
            fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            GroupTokens::read_file(&file)
        };
        assert_eq!(with(0o600).unwrap().warning(), None);
        assert!(with(0o644).unwrap().warning().unwrap().contains("chmod 600"));
        let open = with(0o666).unwrap_err();
        assert!(open.to_string().contains("chmod 600") && open.kind() == ErrorKind::Invalid, "{open}");
        assert!(GroupTokens::read_file(dir.path()).unwrap_err().to_string().contains("no file"));
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, vec![b'x'; 1 << 17]).unwrap();
        assert!(GroupTokens::read_file(&file).unwrap_err().to_string().contains("more than"));
    }
}
