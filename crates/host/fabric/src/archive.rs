//! Collected facts in a file, `.tar.zst`, laid out like `/`. Owns the file format. The entries come from the readers, so that an
//! examination elsewhere works on the same data.

use crate::tree::TreeEntry;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Component, Path};

/// Limit of the unpacked size. The facts of a host with sixteen devices of 256 addresses take 3 MiB.
const MAX_BYTES: u64 = 256 * 1024 * 1024;
/// Limit of the number of entries.
const MAX_ARCHIVE_ENTRIES: usize = 400_000;

/// Packs entries into `out`.
///
/// # Errors
/// When writing to `out` fails.
pub fn write_archive(entries: &BTreeMap<String, TreeEntry>, out: &mut dyn Write) -> io::Result<()> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, entry) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        match entry {
            TreeEntry::File(bytes) => {
                header.set_size(bytes.len() as u64);
                tar.append_data(&mut header, path, bytes.as_slice())?;
            }
            TreeEntry::Link(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                tar.append_link(&mut header, path, target)?;
            }
        }
    }
    let plain = tar.into_inner()?;
    out.write_all(&ruzstd::encoding::compress_to_vec(plain.as_slice(), ruzstd::encoding::CompressionLevel::Fastest))
}

/// Unpacks entries; an uncompressed tar is accepted too.
///
/// # Errors
/// `InvalidData` when the input is no such archive, or exceeds a limit.
pub fn read_archive(mut from: impl Read) -> io::Result<BTreeMap<String, TreeEntry>> {
    let mut start = [0; 4];
    let mut got = 0;
    while got < start.len() {
        match from.read(&mut start[got..])? {
            0 => break,
            n => got += n,
        }
    }
    let all = (&start[..got]).chain(from);
    // The magic number of a zstd frame.
    let plain: Box<dyn Read + '_> = if start == [0x28, 0xb5, 0x2f, 0xfd] {
        Box::new(
            ruzstd::decoding::StreamingDecoder::new(all).map_err(|e| invalid_data(format!("not a zstd frame: {e}")))?,
        )
    } else {
        Box::new(all)
    };
    let mut tar = tar::Archive::new(plain.take(MAX_BYTES));
    let mut entries = BTreeMap::new();
    for entry in tar.entries()? {
        // The library's message quotes bytes of the input, which may be anything.
        let mut entry =
            entry.map_err(|_| invalid_data("not an archive of `net collect`, or an incomplete one".into()))?;
        let Some(path) = plain_path(&entry.path()?) else { continue };
        let kind = entry.header().entry_type();
        if kind.is_symlink() {
            if let Some(target) = entry.link_name()?.and_then(|t| t.to_str().map(str::to_owned)) {
                entries.insert(path, TreeEntry::Link(target));
            }
        } else if kind.is_file() {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes)?;
            entries.insert(path, TreeEntry::File(bytes));
        }
        if entries.len() > MAX_ARCHIVE_ENTRIES {
            return Err(invalid_data(format!("more than {MAX_ARCHIVE_ENTRIES} files")));
        }
    }
    if entries.is_empty() {
        return Err(invalid_data("the archive is empty".into()));
    }
    Ok(entries)
}

fn invalid_data(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// A path without `/`, `.` and `..`; `None` when the path is not UTF-8.
fn plain_path(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => parts.push(name.to_str()?),
            Component::ParentDir => return None,
            _ => {}
        }
    }
    (!parts.is_empty()).then(|| parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn some() -> BTreeMap<String, TreeEntry> {
        let long = format!("sys/{}/x", "a".repeat(200));
        [
            ("sys/class/net/ib0".to_owned(), TreeEntry::Link("../../devices/x".into())),
            ("sys/devices/x/mtu".to_owned(), TreeEntry::File(b"2044\n".to_vec())),
            ("sys/devices/x/config".to_owned(), TreeEntry::File((0..=255).collect())),
            (long.clone(), TreeEntry::Link(long)),
        ]
        .into()
    }

    #[test]
    fn there_and_back() {
        let mut packed = Vec::new();
        write_archive(&some(), &mut packed).unwrap();
        assert_eq!(read_archive(packed.as_slice()).unwrap(), some());
        for cut in [0, 3, 10, packed.len() / 2] {
            assert!(read_archive(&packed[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn nothing_climbs_out() {
        assert_eq!(plain_path(Path::new("/etc/./hosts")).as_deref(), Some("etc/hosts"));
        assert_eq!(plain_path(Path::new("../../etc/hosts")), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn nonsense_is_an_error(at in 0usize..400, bit in 0u8..8, junk in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = read_archive(junk.as_slice());
            let mut packed = Vec::new();
            write_archive(&some(), &mut packed).unwrap();
            let at = at % packed.len();
            packed[at] ^= 1 << bit;
            let _ = read_archive(packed.as_slice());
        }
    }
}
