//! The state of a mount in a memory file, valid after the end of this process at any instruction: what was agreed with the kernel,
//! the inodes that the kernel refers to, and open handles. Does not know who keeps the file.
//!
//! A version of the state is a module, and its reading stays for a release. A program continues a state of the latest version in
//! place, and writes what a state of the version before holds into a new one. The version stands for all that a process leaves to the
//! next: another form of the logs of open files, or of the names of kept descriptors, has another version too.

mod v4;

/// The version of the release before, which is read. This is the first release.
use v4 as earlier;
/// The version that is written.
use v4 as latest;

pub use latest::KeptState;
pub(crate) use latest::set_thread_request;

use spurline_fs::KeptRecords as _;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

/// The first words of all versions: "spurline", and the version.
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const MAGIC: u64 = u64::from_le_bytes(*b"spurline");

impl KeptState {
    /// The state of a process before.
    ///
    /// # Errors
    /// When the memory file is not the state of a mount, or of a version that this program does not read.
    pub fn open(file: OwnedFd) -> io::Result<KeptState> {
        let file = File::from(file);
        let mut words = [0; 16];
        file.read_exact_at(&mut words, 0)?;
        let [magic, version] = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|byte| words[at + byte])));
        if magic != MAGIC {
            Err(io::Error::other("the kept memory is not the state of a mount"))
        } else if version == latest::VERSION {
            KeptState::open_same(file.into())
        } else if version == earlier::VERSION {
            convert(&earlier::KeptState::open_same(file.into())?)
        } else {
            Err(io::Error::other(format!(
                "the state of the mount has version {version}, and this program reads version {} and that of the release before: \
                 unmount, and mount again with this program",
                latest::VERSION
            )))
        }
    }

    /// Whether this state has another memory file than that of the process before, which the program of that process could not read.
    pub fn is_converted(&self) -> bool {
        self.is_converted
    }
}

/// A state of the latest version with what a state of the version before holds, which stays as it is.
fn convert(state: &earlier::KeptState) -> io::Result<KeptState> {
    let converted = KeptState::create(state.len_bytes())?;
    if let Some(agreed) = state.agreement() {
        converted.set_agreement(&agreed);
    }
    if let Some((mountpoint, settings)) = state.mount() {
        converted.keep_mount(&mountpoint, &settings);
    }
    converted.set_client_numbers(state.client_numbers());
    state.for_each(&mut |_, record| {
        converted.keep(record);
    });
    if converted.refused_records() > 0 {
        let refused = converted.refused_records();
        return Err(io::Error::other(format!("{refused} records of version {} have no room", earlier::VERSION)));
    }
    let mut opened = KeptState::open_same(converted.duplicate_file()?)?;
    opened.is_converted = true;
    Ok(opened)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::InitAgreement;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use spurline_fs::{
        KeptChange, KeptHandle, KeptInode, KeptLock, KeptName, KeptNode, KeptRecord, KeptVersion, MadeChange,
        RequestNumber,
    };
    use spurline_types::FileKind;
    use spurline_volume::kept_client::{HeldFile, KeptClient as _, SentChange};
    use spurline_volume::writes::{FileIdentity, FileLock, LockFamily, LockKind, LockRange};
    use std::fmt::Write as _;
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    /// Keeps all that a state can have.
    fn fill(state: &KeptState) {
        let identity = FileIdentity::new([7; FileIdentity::LEN], true);
        state.set_agreement(&InitAgreement {
            minor: 45,
            passthrough: true,
            uring: false,
            create_group: false,
            direct_mmap: true,
        });
        state.keep_mount(Path::new("/mnt/a"), "--rw=true\n");
        state.keep(&KeptRecord::Inode(KeptInode {
            ino: 6,
            kind: FileKind::Symlink,
            lookups: 3,
            mtime: SystemTime::UNIX_EPOCH + Duration::from_nanos(1_700_000_000_000_000_005),
            mode: 0o644,
            path: b"a/b",
            first: KeptVersion { size: 9, version: "first-version", etag: Some("an etag") },
            grown: Some(KeptVersion { size: 19, version: "second", etag: None }),
        }));
        let removed = Some([0o40755, 1000, u32::MAX]);
        let node = KeptNode { ino: 9, lookups: 2, identity, known_generation: Some(4), directory: true, removed };
        state.keep(&KeptRecord::Node(node));
        state.keep(&KeptRecord::Name(KeptName { ino: 9, parent: 1, name: b"a name that is longer than a word" }));
        let handle = KeptHandle {
            fh: 8,
            ino: 9,
            backing_id: 3,
            request: 12,
            flags: -1,
            directory: true,
            direct_writer: true,
            opener: 4_194_303,
            ..KeptHandle::default()
        };
        state.keep(&KeptRecord::Handle(handle));
        let held = Some(HeldFile { number: 1, node: 2, process: u64::MAX, closing: true });
        state.keep(&KeptRecord::Handle(KeptHandle { fh: 10, owner: [u32::MAX, 7], held, ..KeptHandle::default() }));
        let range = LockRange { start: 3, end: u64::MAX };
        let lock = FileLock { family: LockFamily::Flock, owner: u64::MAX, range, kind: LockKind::Write };
        state.keep(&KeptRecord::Lock(KeptLock { ino: 9, fh: 8, lock, pid: u32::MAX }));
        let made = Some(MadeChange { count: 5, object: Some(identity) });
        let sent = SentChange { number: 11, process: 4, place: 77, known: [Some(FileIdentity::from_number(3)), None] };
        state.keep(&KeptRecord::Change(KeptChange { request: 6, before: 77, made, sent }));
        state.begin(5);
        state.reserve_numbers(20);
    }

    /// All that a state has, as text.
    fn contents_of(state: &KeptState) -> Vec<String> {
        let mut contents = vec![format!("{:?} {:?}", state.agreement(), state.mount())];
        state.for_each(&mut |_, record| contents.push(format!("{record:?}")));
        contents.push(format!("{:?} {}", state.begin(0), state.reserve_numbers(0)));
        set_thread_request(RequestNumber { number: 6, repeated: true });
        contents.push(format!("{:?}", state.take_repeated()));
        set_thread_request(RequestNumber::NONE);
        contents
    }

    /// The words of a memory file, without zeros at the end.
    fn text_of(file: &File) -> String {
        let mut bytes = vec![0; 8 << 10];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let len = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let mut text = String::new();
        for line in bytes[..len.next_multiple_of(64)].as_chunks::<64>().0 {
            let words = line.as_chunks::<8>().0.iter().map(|word| format!("{:x}", u64::from_le_bytes(*word)));
            writeln!(text, "{}", words.collect::<Vec<String>>().join(" ")).unwrap();
        }
        text
    }

    /// A memory file with these first words.
    fn memory_file(words: impl Iterator<Item = u64>) -> File {
        let file = File::from(memfd_create("recorded", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, 4 << 20).unwrap();
        for (at, word) in words.enumerate() {
            file.write_all_at(&word.to_le_bytes(), at as u64 * 8).unwrap();
        }
        file
    }

    fn recorded(text: &str) -> File {
        memory_file(text.split_whitespace().map(|word| u64::from_str_radix(word, 16).unwrap()))
    }

    /// States of releases, by version: of the release before, and the latest.
    const RECORDED: [(u64, &str); 1] = [(4, include_str!("../tests/kept_state/v4"))];

    #[test]
    fn another_form_of_the_state_has_another_version() {
        let state = KeptState::create(0).unwrap();
        fill(&state);
        let text = text_of(&state.duplicate_file().unwrap().into());
        let (version, known) = RECORDED[RECORDED.len() - 1];
        assert!(
            version == latest::VERSION && text == known,
            "version {version} of the state has another form than before: give the form another version, in a module of its own, \
             and keep this as a further record of tests/kept_state:\n{text}"
        );
    }

    #[test]
    fn states_of_this_release_and_the_one_before_are_read() {
        let state = KeptState::create(0).unwrap();
        fill(&state);
        let wanted = contents_of(&KeptState::open(state.duplicate_file().unwrap()).unwrap());
        assert_eq!(wanted.len(), 10);
        for (version, text) in RECORDED {
            let state = KeptState::open(recorded(text).into()).unwrap();
            assert_eq!(state.is_converted(), version != latest::VERSION);
            assert_eq!(contents_of(&state), wanted, "version {version}");
        }
    }

    #[test]
    fn a_state_is_converted_into_a_new_one_and_stays_as_it_is() {
        let (version, text) = RECORDED[0];
        assert_eq!(version, earlier::VERSION);
        let file = recorded(text);
        let converted = convert(&earlier::KeptState::open_same(file.try_clone().unwrap().into()).unwrap()).unwrap();
        assert!(converted.is_converted());
        let wanted = contents_of(&KeptState::open(recorded(text).into()).unwrap());
        assert_eq!(contents_of(&converted), wanted);
        assert_eq!(text_of(&file), text, "a program of the version before can go on with its state");
    }

    #[test]
    fn another_version_is_refused_by_name() {
        for version in [earlier::VERSION - 1, latest::VERSION + 1] {
            let refusal = KeptState::open(memory_file([MAGIC, version].into_iter()).into()).err().unwrap().to_string();
            assert!(refusal.contains(&format!("version {version}, ")), "{refusal}");
            assert!(refusal.ends_with("unmount, and mount again with this program"), "{refusal}");
        }
        assert!(KeptState::open(memory_file([0, latest::VERSION].into_iter()).into()).is_err());
    }
}
