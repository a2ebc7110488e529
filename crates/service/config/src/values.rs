//! Parsers of flag values: cache sizes, origins, addresses, choices.

use spurline_types::{Size, url};
use std::ffi::OsStr;
use std::fmt;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

/// The limit of the disk cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheSize {
    /// No disk cache (`0`).
    None,
    /// This many bytes over all directories.
    Bytes(u64),
    /// All space that the free-space ratio leaves (`-1`).
    All,
}

impl FromStr for CacheSize {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        if s.trim() == "-1" {
            return Ok(CacheSize::All);
        }
        match s.parse::<Size>() {
            Ok(Size(0)) => Ok(CacheSize::None),
            Ok(Size(n)) => Ok(CacheSize::Bytes(n)),
            Err(e) => Err(format!("{e}; -1 means all the space there is, 0 no disk cache")),
        }
    }
}

impl fmt::Display for CacheSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CacheSize::None => f.write_str("0"),
            CacheSize::All => f.write_str("-1"),
            CacheSize::Bytes(n) => Size(*n).fmt(f),
        }
    }
}

/// A node's weight: the share of the group's blocks in relation to other nodes.
///
/// # Errors
/// Why the number is wrong, and which are right.
pub fn parse_weight(s: &str) -> Result<u32, String> {
    s.trim().parse().map_err(|_| {
        format!(
            "'{s}' is not a weight; give a whole number from 0, which takes no blocks, to {}; 100 is the default",
            u32::MAX
        )
    })
}

/// The levels of a log.
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The file of a log. A level is refused: `--log debug` would write a file of that name.
///
/// # Errors
/// Why the word is no file, and what sets the level.
pub fn parse_log_file(s: &str) -> Result<PathBuf, String> {
    if LOG_LEVELS.contains(&s.to_ascii_lowercase().as_str()) {
        return Err(format!(
            "'{s}' is a level and not a file; --log-filter {s} (SPURLINE_LOG_FILTER={s}) sets the level, and ./{s} is a file \
             of that name"
        ));
    }
    if s.is_empty() {
        return Err("an empty word names no file".into());
    }
    Ok(PathBuf::from(s))
}

/// Permission bits in octal, as for `chmod`: at most 0777.
///
/// # Errors
/// Why the word is no such number.
pub fn parse_mode(s: &str) -> Result<u16, String> {
    match u16::from_str_radix(s.trim_start_matches("0o"), 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err(format!("'{s}' is not a mode; give an octal number from 0 to 777, such as 0755")),
    }
}

/// An address and port to listen at; `localhost` is the IPv4 loopback address.
///
/// # Errors
/// Which forms are right.
pub fn parse_listen_address(s: &str) -> Result<SocketAddr, String> {
    s.replacen("localhost:", "127.0.0.1:", 1).parse().map_err(|_| {
        format!(
            "'{s}' is not an address and port; write 127.0.0.1:9000, localhost:9000, [::1]:9000, or 0.0.0.0:9000 for all \
             interfaces; other names of hosts are not looked up"
        )
    })
}

/// A user and a group as numbers: `UID:GID`.
///
/// # Errors
/// Why the word is no such pair.
pub fn parse_squash(s: &str) -> Result<(u32, u32), String> {
    let pair = s.split_once(':').and_then(|(uid, gid)| Some((id_of_word(uid)?, id_of_word(gid)?)));
    pair.ok_or_else(|| format!("'{s}' is not UID:GID; give two numbers, such as 1000:1000 (id -u, id -g)"))
}

fn id_of_word(word: &str) -> Option<u32> {
    word.parse().ok().filter(|id| *id != u32::MAX)
}

/// The URL of an origin in normal form (`s3://bucket/prefix`, `file:///dir`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SourceUrl(String);

/// The schemes of [`SourceUrl`], each with the form.
const SOURCE_SCHEMES: [(&str, &str); 4] = [
    ("s3", "s3://BUCKET[/PREFIX]"),
    ("gs", "gs://BUCKET[/PREFIX]"),
    ("az", "az://CONTAINER[/PREFIX]"),
    ("file", "file:///DIR"),
];

impl SourceUrl {
    /// The URL in normal form.
    pub fn as_str(&self) -> &str {
        &self.0
    }
    /// `s3`, `gs`, `az` or `file`.
    pub fn scheme(&self) -> &str {
        self.0.split_once("://").map_or("file", |(scheme, _)| scheme)
    }
    fn from_directory(path: &Path) -> SourceUrl {
        SourceUrl(url::directory_url(absolute_path(path).as_os_str().as_bytes()))
    }
}

impl fmt::Display for SourceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for SourceUrl {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let Some((scheme, rest)) = s.split_once("://") else {
            if s.is_empty() {
                return Err("a source is a path or a URL such as s3://BUCKET/PREFIX, not an empty word".into());
            }
            if let Some(url) = likely_url(s) {
                return Err(format!(
                    "'{s}' is a URL with a wrong separator, or a relative path; write {url}, or ./{s} for the path"
                ));
            }
            return Ok(SourceUrl::from_directory(Path::new(s)));
        };
        let scheme = scheme.to_ascii_lowercase();
        let Some((_, form)) = SOURCE_SCHEMES.iter().find(|(known, _)| *known == scheme) else {
            let known: Vec<_> = SOURCE_SCHEMES.iter().map(|(_, form)| *form).collect();
            let near = SOURCE_SCHEMES.iter().find(|(known, _)| edit_distance(&scheme, known) == 1);
            let near = near.map_or(String::new(), |(near, _)| format!(" (did you mean {near}://?)"));
            return Err(format!(
                "'{s}' has the unknown scheme '{scheme}'{near}; write a plain path or {}",
                known.join(", ")
            ));
        };
        if scheme == "file" {
            if !rest.starts_with('/') {
                return Err(format!("'{s}' names no absolute directory; write {form} with three slashes"));
            }
            return Ok(SourceUrl::from_directory(Path::new(OsStr::from_bytes(&url::percent_decoded(rest)))));
        }
        let rest = rest.trim_end_matches('/');
        if rest.is_empty() || rest.starts_with('/') {
            let near = likely_url(s).map_or(String::new(), |near| format!(" (did you mean {near}?)"));
            return Err(format!("'{s}' names no bucket{near}; write {form}"));
        }
        Ok(SourceUrl(format!("{scheme}://{rest}")))
    }
}

/// The URL that was probably meant by a word that begins with a scheme and continues with other than `://`: `s3:/b`,
/// `s3//b`.
fn likely_url(word: &str) -> Option<String> {
    let scheme_len = word.find([':', '/'])?;
    let (scheme, rest) = word.split_at(scheme_len);
    let scheme = scheme.to_ascii_lowercase();
    let place = rest.trim_start_matches([':', '/']);
    let separated = rest.starts_with(':') || rest.starts_with("//");
    if !separated || place.is_empty() || !SOURCE_SCHEMES.iter().any(|(known, _)| *known == scheme) {
        return None;
    }
    let slash = if scheme == "file" { "/" } else { "" };
    Some(format!("{scheme}://{slash}{place}"))
}

/// Makes `path` absolute by text alone: no component is accessed, so nothing can hang.
pub fn absolute_path(path: &Path) -> PathBuf {
    let mut out = if path.is_absolute() { PathBuf::new() } else { std::env::current_dir().unwrap_or_default() };
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    if out.as_os_str().is_empty() { PathBuf::from("/") } else { out }
}

/// The number of nodes per file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaCounts {
    /// For all files.
    pub all: u32,
    /// For the files at and below a path, without a leading slash.
    pub below: Vec<(Vec<u8>, u32)>,
}

impl ReplicaCounts {
    /// The maximum: a read considers no more nodes at first.
    const MOST: u32 = 8;
}

impl FromStr for ReplicaCounts {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let mut all = None;
        let mut below = Vec::new();
        for part in s.split(',') {
            match part.rsplit_once('=') {
                Some((path, _)) if path.contains("://") => {
                    return Err(format!("'{path}' is a URL: give the path below the mount; write 1,train/hot=3"));
                }
                Some((path, n)) => {
                    let path = path.trim().trim_matches('/').as_bytes().to_vec();
                    let n = parse_copies(n)?;
                    match below.iter().find(|(known, _)| *known == path) {
                        Some((_, other)) if *other != n => {
                            let path = String::from_utf8_lossy(&path);
                            return Err(format!("'{s}' has two numbers for {path}: {other} and {n}"));
                        }
                        Some(_) => {}
                        None => below.push((path, n)),
                    }
                }
                None if all.is_none() => all = Some(parse_copies(part)?),
                None => return Err(format!("'{s}' has two numbers for everything; write 2, or 1,train/hot=3")),
            }
        }
        Ok(ReplicaCounts { all: all.unwrap_or(1), below })
    }
}

/// What carries data between a mount and a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum TransportMode {
    /// RDMA where both sides have rails, TCP elsewhere
    #[default]
    Auto,
    /// TCP only
    Tcp,
    /// RDMA only
    Rdma,
}

/// How cache disks are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum IorpcMode {
    /// O_DIRECT with io_uring
    #[default]
    Dio,
    /// Buffered reads through the page cache
    Pagecache,
    /// splice from the page cache to the socket where possible; dio on a node with rails
    Splice,
    /// Do not read cache disks: use memory and the origin only
    Disable,
}

/// How the kernel's requests are fetched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum FuseIo {
    /// io_uring where the kernel supports it and it is faster, /dev/fuse elsewhere
    #[default]
    Auto,
    /// FUSE over io_uring; root enables it for the whole host where it is off, and leaves it on; exit code 3 where the
    /// kernel does not support it
    Uring,
    /// Cloned /dev/fuse descriptors
    Dev,
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum LogFormat {
    /// Plain text
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// The shortest word that is compared with known words: two edits make most shorter words of each other.
const SHORTEST_COMPARED_WORD: usize = 3;

/// The candidate with the smallest edit distance to `word`, if small enough to be the intended word. Leading dashes are not
/// part of a word.
pub fn nearest_word<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.trim_start_matches('-');
    let letters = word.chars().count();
    let most_edits = match letters {
        ..SHORTEST_COMPARED_WORD => return None,
        SHORTEST_COMPARED_WORD => 1,
        _ => (letters / 3).max(2),
    };
    candidates.map(|c| (edit_distance(word, c), c)).filter(|(d, _)| *d <= most_edits).min().map(|(_, c)| c)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn parse_copies(text: &str) -> Result<u32, String> {
    match text.trim().parse() {
        Ok(n @ 1..=ReplicaCounts::MOST) => Ok(n),
        _ => Err(format!(
            "'{text}' is not a number of copies from 1 to {}; write 2, or 1,train/hot=3",
            ReplicaCounts::MOST
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_copies() {
        let parse = |text: &str| text.parse::<ReplicaCounts>();
        assert_eq!(parse("2"), Ok(ReplicaCounts { all: 2, below: vec![] }));
        assert_eq!(parse("1,/a/b/=3"), Ok(ReplicaCounts { all: 1, below: vec![(b"a/b".to_vec(), 3)] }));
        assert!(parse("2,s3://data/big=3").unwrap_err().contains("below the mount"));
        assert!(parse("/big=1,big=2").unwrap_err().contains("two numbers for big"));
        assert_eq!(parse("/big=2,big=2"), Ok(ReplicaCounts { all: 1, below: vec![(b"big".to_vec(), 2)] }));
        assert_eq!(parse("a=b=2"), Ok(ReplicaCounts { all: 1, below: vec![(b"a=b".to_vec(), 2)] }));
        for wrong in ["", "0", "9", "x", "1,2", "a=", "a=0", "-1"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn modes() {
        assert_eq!(parse_mode("0755"), Ok(0o755));
        assert_eq!(parse_mode("444"), Ok(0o444));
        for wrong in ["", "8", "1777", "rwx", "-1"] {
            assert!(parse_mode(wrong).unwrap_err().contains("octal"), "{wrong}");
        }
    }

    #[test]
    fn cache_sizes() {
        assert_eq!("-1".parse(), Ok(CacheSize::All));
        assert_eq!("0".parse(), Ok(CacheSize::None));
        assert_eq!("2G".parse(), Ok(CacheSize::Bytes(2 << 30)));
        assert!("-2".parse::<CacheSize>().unwrap_err().contains("-1 means all"));
    }

    #[test]
    fn sources() {
        assert_eq!("/a/./b/../c".parse::<SourceUrl>().unwrap().as_str(), "file:///a/c");
        assert_eq!("file:///x/".parse::<SourceUrl>().unwrap().as_str(), "file:///x");
        assert_eq!("S3://b/p/".parse::<SourceUrl>().unwrap().as_str(), "s3://b/p");
        assert_eq!("s3://b".parse::<SourceUrl>().unwrap().scheme(), "s3");
        // A path means its bytes; a URL may escape them. Both are the same source.
        for (text, url) in [
            ("/a b/\u{e9}", "file:///a%20b/%C3%A9"),
            ("file:///a b/\u{e9}", "file:///a%20b/%C3%A9"),
            ("file:///a%20b/%c3%a9/", "file:///a%20b/%C3%A9"),
            ("/a%20b", "file:///a%2520b"),
            ("file:///100%", "file:///100%25"),
            ("s3://b/a b%", "s3://b/a b%"),
            ("/s3:/b", "file:///s3:/b"),
            ("/s3//b", "file:///s3/b"),
        ] {
            assert_eq!(text.parse::<SourceUrl>().unwrap().as_str(), url);
        }
        for (text, says) in [
            ("s4://b", "did you mean s3"),
            ("gcs://b", "did you mean gs"),
            ("http://x", "unknown scheme 'http'; write"),
            ("s3://", "names no bucket; write"),
            ("s3:///b", "names no bucket (did you mean s3://b?)"),
            ("s3:/b", "write s3://b, or ./s3:/b for the path"),
            ("s3//b/p", "write s3://b/p,"),
            ("S3:b", "write s3://b,"),
            ("gs:////b", "did you mean gs://b?"),
            ("file:/d", "write file:///d,"),
            ("file://x", "three slashes"),
            ("", "empty"),
        ] {
            let error = text.parse::<SourceUrl>().unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_level_is_no_log_file() {
        assert_eq!(parse_log_file("/var/log/x").unwrap(), PathBuf::from("/var/log/x"));
        assert_eq!(parse_log_file("./debug").unwrap(), PathBuf::from("./debug"));
        for level in ["debug", "INFO"] {
            let refusal = parse_log_file(level).unwrap_err();
            assert!(refusal.contains(&format!("SPURLINE_LOG_FILTER={level}")), "{refusal}");
        }
        assert!(parse_log_file("").is_err());
    }

    #[test]
    fn nearest_words() {
        let known = ["cache-size", "cache-dir", "block-size"];
        assert_eq!(nearest_word("cache_size", known.into_iter()), Some("cache-size"));
        assert_eq!(nearest_word("cachedir", known.into_iter()), Some("cache-dir"));
        assert_eq!(nearest_word("colour", known.into_iter()), None);
        assert_eq!(nearest_word("--cache-sise", known.into_iter()), Some("cache-size"));
        // Words of two letters are near to every short word.
        let short = ["uid", "gid", "ro", "dev"];
        assert_eq!(nearest_word("bg", short.into_iter()), None);
        assert_eq!(nearest_word("--v", short.into_iter()), None);
        assert_eq!(nearest_word("--uid", short.into_iter()), Some("uid"));
        assert_eq!(nearest_word("url", short.into_iter()), None);
    }
}
