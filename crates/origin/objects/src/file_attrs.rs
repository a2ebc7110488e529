//! Owner, mode, times and extended attributes of a file in the metadata of its object. It knows no request and no name.
//!
//! | attribute | name, value as FSx for Lustre and DataSync write them | name, value as s3fs and rclone write them |
//! |---|---|---|
//! | type and mode | `file-permissions`, octal | `mode`, decimal |
//! | owner, group | `file-owner`, `file-group`, decimal | `uid`, `gid`, decimal |
//! | times | `file-mtime`, `file-atime`, nanoseconds with the end `ns`; milliseconds without it | `mtime`, `atime`, seconds with a fraction |
//! | extended attributes | | `xattr`, an object of JSON with values in base64, percent-encoded |
//!
//! A value is stored under the name that the object has already, so that the program that made the object finds it; new values
//! get the first name. The bytes of a symbolic link are its target, as in both conventions.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use spurline_object_store::{ObjectAttributes, encode_query};
use spurline_types::{Error, ErrorKind, OBJECT_HEADERS_XATTR, ObjectHeaders, Result};
use spurline_volume::writes::{AttrChange, FileTime, NewTime, S_IFLNK, S_IFMT};
use std::collections::BTreeMap;
use std::time::SystemTime;

/// Bytes of names and values of an object's metadata, as S3 allows them.
const METADATA_MAX: usize = 2048;
/// Set-user-ID.
const S_ISUID: u32 = 0o4000;
/// Set-group-ID.
const S_ISGID: u32 = 0o2000;
/// The group may execute.
const S_IXGRP: u32 = 0o010;
/// Extended attributes, in the form of s3fs.
const XATTRS: &str = "xattr";
/// Checksums and times that other programs store with an object, and that new bytes make wrong.
const OF_BYTES: [&str; 2] = ["md5chksum", "s3cmd-attrs"];

/// The names of an attribute: that of FSx, and that of s3fs.
struct AttrNames {
    fsx: &'static str,
    s3fs: &'static str,
}

const MODE: AttrNames = AttrNames { fsx: "file-permissions", s3fs: "mode" };
const OWNER: AttrNames = AttrNames { fsx: "file-owner", s3fs: "uid" };
const GROUP: AttrNames = AttrNames { fsx: "file-group", s3fs: "gid" };
const MTIME: AttrNames = AttrNames { fsx: "file-mtime", s3fs: "mtime" };
const ATIME: AttrNames = AttrNames { fsx: "file-atime", s3fs: "atime" };

/// What an object's metadata say about its file; `None` where they say nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileAttrs {
    /// File type and permission bits.
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mtime: Option<FileTime>,
    pub atime: Option<FileTime>,
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// Headers that replace the headers of the object; never in metadata that were read.
    pub headers: Option<ObjectHeaders>,
}

impl FileAttrs {
    /// Those in an object's metadata. A value that cannot be read counts as absent.
    pub fn parse(attributes: &ObjectAttributes) -> FileAttrs {
        let number = |names: &AttrNames| {
            let text = attributes.get(names.fsx).or_else(|| attributes.get(names.s3fs));
            text.and_then(|text| text.trim().parse().ok())
        };
        let octal = attributes.get(MODE.fsx).and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
        FileAttrs {
            mode: octal.or_else(|| attributes.get(MODE.s3fs).and_then(|text| text.trim().parse().ok())),
            uid: number(&OWNER),
            gid: number(&GROUP),
            mtime: parse_time_of(attributes, &MTIME),
            atime: parse_time_of(attributes, &ATIME),
            xattrs: attributes.get(XATTRS).and_then(parse_xattrs).unwrap_or_default(),
            headers: None,
        }
    }

    /// Writes new headers into an object's attributes, and nothing else.
    pub fn store_headers(&self, attributes: &mut ObjectAttributes) {
        if let Some(headers) = &self.headers {
            attributes.set_headers(headers);
        }
    }

    /// Sets the headers of the object; metadata about the file, as rclone sends the time, count as the attributes of the file.
    fn set_headers(&mut self, value: &[u8]) -> Result<()> {
        let headers = ObjectHeaders::from_xattr(value);
        let headers = headers.ok_or_else(|| Error::new(ErrorKind::Invalid, "the value is no JSON of headers"))?;
        let mut attributes = ObjectAttributes::default();
        attributes.set_headers(&headers);
        let given = FileAttrs::parse(&attributes);
        self.mode = given.mode.or(self.mode);
        self.uid = given.uid.or(self.uid);
        self.gid = given.gid.or(self.gid);
        self.mtime = given.mtime.or(self.mtime);
        self.atime = given.atime.or(self.atime);
        self.headers = Some(headers);
        Ok(())
    }

    /// Writes them into an object's metadata.
    pub fn store(&self, attributes: &mut ObjectAttributes) {
        self.store_headers(attributes);
        if let Some(mode) = self.mode {
            set(attributes, &MODE, format!("{mode:07o}"), format!("{mode}"));
        }
        for (names, id) in [(&OWNER, self.uid), (&GROUP, self.gid)] {
            if let Some(id) = id {
                set(attributes, names, format!("{id}"), format!("{id}"));
            }
        }
        for (names, time) in [(&MTIME, self.mtime), (&ATIME, self.atime)] {
            if let Some(time) = time {
                let nanos = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos);
                set(attributes, names, format!("{nanos}ns"), format!("{}.{:09}", time.seconds, time.nanos));
            }
        }
        attributes.user.retain(|(name, _)| name != XATTRS);
        if !self.xattrs.is_empty() {
            attributes.set(XATTRS, show_xattrs(&self.xattrs));
        }
    }

    /// Whether the object is a symbolic link.
    pub fn is_link(&self) -> bool {
        self.mode.is_some_and(|mode| mode & S_IFMT == S_IFLNK)
    }

    /// Applies a change of owner, mode and times. A new owner loses the file's set-user-ID and set-group-ID bits.
    pub fn apply(&mut self, set: &AttrChange, file_type: u32, default_mode: u32) {
        let mode = self.mode.unwrap_or(default_mode) & !S_IFMT;
        if let Some(mode) = set.mode {
            self.mode = Some(file_type | mode & !S_IFMT);
        } else if set.uid.is_some() || set.gid.is_some() {
            self.mode = Some(file_type | without_privileges(file_type, mode));
        }
        self.uid = set.uid.or(self.uid);
        self.gid = set.gid.or(self.gid);
        self.mtime = set.mtime.map(|time| file_time_of(&time)).or(self.mtime);
        self.atime = set.atime.map(|time| file_time_of(&time)).or(self.atime);
    }

    /// A write by a caller without the right to keep them takes the file's set-user-ID and set-group-ID bits away; whether
    /// there were any.
    pub fn lose_privileges(&mut self) -> bool {
        let before = self.mode;
        self.mode = before.map(|mode| without_privileges(mode & S_IFMT, mode));
        self.mode != before
    }

    /// Sets an extended attribute; `flags` as for `setxattr(2)`.
    ///
    /// # Errors
    /// `EEXIST` and `ENODATA` by the flags; `EILSEQ` for a name that is not UTF-8.
    pub fn set_xattr(&mut self, name: &[u8], value: &[u8], flags: u32) -> Result<()> {
        if name == OBJECT_HEADERS_XATTR {
            return self.set_headers(value);
        }
        let name = std::str::from_utf8(name).map_err(|_| Error::new(ErrorKind::Io(libc::EILSEQ), "not UTF-8"))?;
        if flags & libc::XATTR_CREATE as u32 != 0 && self.xattrs.contains_key(name) {
            return Err(Error::new(ErrorKind::Io(libc::EEXIST), "the extended attribute exists"));
        }
        if flags & libc::XATTR_REPLACE as u32 != 0 && !self.xattrs.contains_key(name) {
            return Err(no_xattr());
        }
        self.xattrs.insert(name.to_owned(), value.to_vec());
        Ok(())
    }

    /// # Errors
    /// `ENODATA`.
    pub fn remove_xattr(&mut self, name: &[u8]) -> Result<()> {
        let removed = std::str::from_utf8(name).ok().and_then(|name| self.xattrs.remove(name));
        removed.map(drop).ok_or_else(no_xattr)
    }

    /// # Errors
    /// `ENODATA`.
    pub fn xattr(&self, name: &[u8]) -> Result<Vec<u8>> {
        let found = std::str::from_utf8(name).ok().and_then(|name| self.xattrs.get(name));
        found.cloned().ok_or_else(no_xattr)
    }

    /// The names of the extended attributes, each followed by a NUL.
    pub fn xattr_names(&self) -> Vec<u8> {
        self.xattrs.keys().flat_map(|name| name.bytes().chain([0])).collect()
    }
}

pub(crate) fn no_xattr() -> Error {
    Error::new(ErrorKind::Io(libc::ENODATA), "no such extended attribute")
}

fn without_privileges(file_type: u32, mode: u32) -> u32 {
    // A directory keeps its own; without execution by the group, set-group-ID means something else.
    match file_type {
        spurline_volume::writes::S_IFREG if mode & S_IXGRP != 0 => mode & !(S_ISUID | S_ISGID),
        spurline_volume::writes::S_IFREG => mode & !S_ISUID,
        _ => mode,
    }
}

/// The object's metadata after a change of its bytes: what other programs stored about the bytes before is wrong now.
pub(crate) fn forget_old_bytes(attributes: &mut ObjectAttributes, changed_at: FileTime) {
    attributes.user.retain(|(name, _)| !OF_BYTES.contains(&name.as_str()));
    if attributes.get(MTIME.fsx).is_some() || attributes.get(MTIME.s3fs).is_some() {
        FileAttrs { mtime: Some(changed_at), ..FileAttrs::parse(attributes) }.store(attributes);
    }
}

/// Refuses metadata that S3 has no space for.
///
/// # Errors
/// `ENOSPC`.
pub(crate) fn check_space(attributes: &ObjectAttributes) -> Result<()> {
    let len: usize = attributes.user.iter().map(|(name, value)| name.len() + value.len()).sum();
    if len <= METADATA_MAX {
        return Ok(());
    }
    let why = format!("the attributes of the file need {len} bytes of metadata, and an object has {METADATA_MAX}");
    Err(Error::new(ErrorKind::Io(libc::ENOSPC), why))
}

/// Sets an attribute under the name that the object has already, or under that of FSx.
fn set(attributes: &mut ObjectAttributes, names: &AttrNames, fsx: String, s3fs: String) {
    let has_s3fs = attributes.get(names.s3fs).is_some();
    if has_s3fs {
        attributes.set(names.s3fs, s3fs);
    }
    if !has_s3fs || attributes.get(names.fsx).is_some() {
        attributes.set(names.fsx, fsx);
    }
}

/// A time of the system as file systems store it.
pub(crate) fn file_time(time: SystemTime) -> FileTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    FileTime { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
}

fn file_time_of(time: &NewTime) -> FileTime {
    match time {
        NewTime::Now => file_time(SystemTime::now()),
        NewTime::At(time) => *time,
    }
}

fn parse_time_of(attributes: &ObjectAttributes, names: &AttrNames) -> Option<FileTime> {
    match attributes.get(names.fsx) {
        Some(text) => parse_fsx_time(text),
        None => attributes.get(names.s3fs).and_then(parse_s3fs_time),
    }
}

fn parse_fsx_time(text: &str) -> Option<FileTime> {
    let nanos: i128 = match text.trim().strip_suffix("ns") {
        Some(nanos) => nanos.parse().ok()?,
        None => text.trim().parse::<i128>().ok()?.checked_mul(1_000_000)?,
    };
    let seconds = i64::try_from(nanos.div_euclid(1_000_000_000)).ok()?;
    Some(FileTime { seconds, nanos: nanos.rem_euclid(1_000_000_000) as u32 })
}

fn parse_s3fs_time(text: &str) -> Option<FileTime> {
    let text = text.trim();
    let whole = text.split('.').next().unwrap_or_default();
    let fraction: String =
        text.split('.').nth(1).unwrap_or_default().chars().chain("000000000".chars()).take(9).collect();
    Some(FileTime { seconds: whole.parse().ok()?, nanos: fraction.parse().ok()? })
}

fn parse_xattrs(text: &str) -> Option<BTreeMap<String, Vec<u8>>> {
    let json = percent_decode_str(text).decode_utf8().ok()?;
    let values: BTreeMap<String, String> = serde_json::from_str(&json).ok()?;
    let decoded = values.into_iter().map(|(name, value)| Some((name, BASE64_STANDARD.decode(&value).ok()?)));
    decoded.collect()
}

fn show_xattrs(xattrs: &BTreeMap<String, Vec<u8>>) -> String {
    let values: serde_json::Map<String, serde_json::Value> =
        xattrs.iter().map(|(name, value)| (name.clone(), BASE64_STANDARD.encode(value).into())).collect();
    encode_query(&serde_json::Value::Object(values).to_string()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(pairs: &[(&str, &str)]) -> ObjectAttributes {
        let user = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        ObjectAttributes { user, ..ObjectAttributes::default() }
    }

    #[test]
    fn attributes_keep_the_names_that_the_object_has() {
        let time = FileTime { seconds: 1_595_002_920, nanos: 7 };
        let of_fsx = metadata(&[
            ("file-permissions", "0100664"),
            ("file-owner", "500"),
            ("file-group", "501"),
            ("file-mtime", "1595002920000000007ns"),
            ("file-atime", "1595002920000"),
        ]);
        let attrs = FileAttrs::parse(&of_fsx);
        assert_eq!(attrs.mode, Some(0o100_664));
        assert_eq!(attrs.mtime, Some(time));
        assert_eq!(attrs.atime, Some(FileTime { nanos: 0, ..time }));
        let of_s3fs = metadata(&[
            ("mode", "33204"),
            ("uid", "500"),
            ("gid", "501"),
            ("mtime", "1595002920.000000007"),
            ("atime", "1595002920"),
        ]);
        assert_eq!(FileAttrs::parse(&of_s3fs), attrs);
        let mut changed = attrs.clone();
        changed.apply(&AttrChange { mode: Some(0o600), ..AttrChange::default() }, 0o100_000, 0o644);
        let mut stored = of_s3fs.clone();
        changed.store(&mut stored);
        assert_eq!(stored.get("mode"), Some("33152"));
        assert_eq!(stored.get("file-permissions"), None);
        let mut stored = ObjectAttributes::default();
        changed.store(&mut stored);
        assert_eq!(stored.get("file-permissions"), Some("0100600"));
        assert_eq!(stored.get("file-mtime"), Some("1595002920000000007ns"));
        assert_eq!(FileAttrs::parse(&stored), changed);
    }

    #[test]
    fn extended_attributes_are_those_of_s3fs() {
        let text = "%7B%22user.a%22%3A%22AAH%2F%22%7D";
        let mut attrs = FileAttrs::parse(&metadata(&[("xattr", text)]));
        assert_eq!(attrs.xattr(b"user.a").unwrap(), [0, 1, 255]);
        let mut stored = ObjectAttributes::default();
        attrs.store(&mut stored);
        assert_eq!(stored.get("xattr"), Some(text));
        assert!(attrs.set_xattr(b"user.a", b"x", libc::XATTR_CREATE as u32).is_err());
        assert!(attrs.set_xattr(b"user.b", b"x", libc::XATTR_REPLACE as u32).is_err());
        attrs.set_xattr(b"user.b", &[7; 3000], 0).unwrap();
        assert_eq!(attrs.xattr_names(), b"user.a\0user.b\0");
        attrs.store(&mut stored);
        assert_eq!(check_space(&stored).unwrap_err().kind(), ErrorKind::Io(libc::ENOSPC));
        attrs.remove_xattr(b"user.b").unwrap();
        attrs.remove_xattr(b"user.a").unwrap();
        attrs.store(&mut stored);
        assert_eq!(stored.get("xattr"), None);
        assert!(FileAttrs::parse(&metadata(&[("xattr", "%7B"), ("mode", "x")])) == FileAttrs::default());
    }

    #[test]
    fn headers_replace_those_of_the_object() {
        let mut stored = metadata(&[("note", "old"), ("file-owner", "500")]);
        stored.content = vec![("content-type", "text/plain".into())];
        let mut attrs = FileAttrs::parse(&stored);
        let value = br#"{"content-type":"a/b","x-amz-meta-mtime":"7.5","x-amz-meta-new":"1"}"#;
        attrs.set_xattr(OBJECT_HEADERS_XATTR, value, 0).unwrap();
        assert_eq!(attrs.mtime, Some(FileTime { seconds: 7, nanos: 500_000_000 }));
        attrs.store(&mut stored);
        assert_eq!((stored.get("note"), stored.get("new"), stored.get("file-owner")), (None, Some("1"), Some("500")));
        assert_eq!(stored.content, [("content-type", "a/b".to_owned())]);
        assert_eq!(stored.headers().0["x-amz-meta-mtime"], "7.500000000");
        assert!(attrs.set_xattr(OBJECT_HEADERS_XATTR, b"x", 0).is_err());
    }

    #[test]
    fn new_owners_and_new_bytes_take_privileges_and_checksums_away() {
        let mut attrs = FileAttrs { mode: Some(0o106_755), ..FileAttrs::default() };
        attrs.apply(&AttrChange { uid: Some(7), ..AttrChange::default() }, 0o100_000, 0o644);
        assert_eq!((attrs.mode, attrs.uid), (Some(0o100_755), Some(7)));
        let mut folder = FileAttrs { mode: Some(0o042_775), ..FileAttrs::default() };
        folder.apply(&AttrChange { gid: Some(7), ..AttrChange::default() }, 0o040_000, 0o755);
        assert_eq!(folder.mode, Some(0o042_775));
        let mut of_rclone = metadata(&[("mtime", "1.5"), ("md5chksum", "abc"), ("note", "stays")]);
        forget_old_bytes(&mut of_rclone, FileTime { seconds: 9, nanos: 0 });
        assert_eq!(of_rclone, metadata(&[("note", "stays"), ("mtime", "9.000000000")]));
    }
}
