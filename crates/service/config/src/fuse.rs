//! The FUSE session of a mount: settings and checks. Handles words and numbers only.

use crate::values::FuseIo;
#[cfg(feature = "clap")]
use crate::values::{parse_mode, parse_squash};
use crate::writes::{BucketWrites, WritesConfig};
use spurline_types::fault::Fault;
use spurline_types::{AccessTimes, LABEL_OPTIONS, Size, parse_duration, split_option_list};
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;

settings! {
    /// The FUSE session.
    #[command(next_help_heading = "Mount")]
    pub struct RawFuse {
        /// Mount read-only (the default)
        #[arg(long)]
        pub read_only: bool,
        /// Mount for reading and writing (also -o rw): a directory or an S3 bucket
        ///
        /// Changes of a directory are made there with the identity of the calling process: permissions and quotas are
        /// the source's own. Through nodes, written bytes may come there later: at an fsync or a close, and after a
        /// second. A mount of a directory has no block cache then. A file of a bucket becomes an object at its close or
        /// fsync; all files belong to the user of the mount. In /etc/fstab the word is writable, because mount(8) adds
        /// rw to all options.
        #[arg(long, visible_alias = "writable")]
        pub rw: bool,
        /// Make all changes as this user and group, in place of the calling process's
        #[arg(long, value_name = "UID:GID", value_parser = parse_squash)]
        pub squash: Option<(u32, u32)>,
        /// Locks hold among the programs and NFS clients of this mount only, in place of all that use the source
        ///
        /// With --rw. NFSv3 clients of an export need it for locks: the kernel refuses them on a mount that sets locks
        /// in the source.
        #[arg(long)]
        pub local_locks: bool,
        /// Mount options; the help has the lists of the parser.
        #[arg(short = 'o', long, value_name = "OPT[,OPT]", help = options_help(), long_help = options_long_help())]
        pub options: Vec<String>,
        /// Largest FUSE request; at least 8K
        #[arg(long, value_name = "SIZE")]
        pub max_write: Size = Size::from_str("1M"),
        /// A replaced file is visible after this time
        #[arg(long, value_name = "TIME")]
        pub attr_cache: Duration = parse_duration("1s"),
        /// A new or deleted file is visible after this time
        #[arg(long, value_name = "TIME")]
        pub entry_cache: Duration = parse_duration("1s"),
        /// A new or deleted directory is visible after this time; the shortest of the three times decides how often the
        /// source is queried
        #[arg(long, value_name = "TIME")]
        pub dir_entry_cache: Duration = parse_duration("1s"),
        /// How to receive requests from the kernel
        #[arg(long, value_name = "KIND", value_enum, default_value_t)]
        pub fuse_io: FuseIo,
        /// Threads that serve the kernel's requests; 0 uses as many as --buffer-size allows
        #[arg(long, value_name = "N")]
        pub fuse_threads: u16 = 0,
        /// Never let the kernel read cached files directly, or write a directory's files (FUSE passthrough)
        #[arg(long)]
        pub no_passthrough: bool,
        /// Read-ahead of sequential readers, in bytes fetched; 0 disables it [default: from the buffer size]
        #[arg(long, alias = "readahead", value_name = "SIZE")]
        pub max_readahead: Option<Size>,
        /// Read-ahead of the kernel for buffered reads
        #[arg(long, value_name = "SIZE")]
        pub kernel_readahead: Size = Size::from_str("8M"),
        /// Permission bits of all files, in octal [default: the origin's; 444 for objects]
        ///
        /// Programs in a bucket need 555 or 755 to be executable.
        #[arg(long, value_name = "MODE", value_parser = parse_mode)]
        pub file_mode: Option<u16>,
        /// Permission bits of all directories, in octal [default: the origin's; 555 for prefixes]
        #[arg(long, value_name = "MODE", value_parser = parse_mode)]
        pub dir_mode: Option<u16>,
        /// Owner of all files, as a number [default: the user that mounts]
        #[arg(long, value_name = "UID")]
        pub uid: Option<u32>,
        /// Group of all files, as a number [default: the group of the user that mounts]
        #[arg(long, value_name = "GID")]
        pub gid: Option<u32>,
        /// Write one line per kernel request to this file
        #[arg(long, value_name = "FILE")]
        pub access_log: Option<PathBuf>,
        /// Survive the end of the mount's process: a keeper starts the process again, and programs go on after a pause
        ///
        /// From Linux 6.9 on. The keeper holds the connection to the kernel, which names and files programs use, and
        /// what they have changed. Requests come over /dev/fuse. `spurline upgrade` replaces the program of such a
        /// mount.
        #[arg(long)]
        pub recover: bool,
        /// How a bucket is changed.
        #[command(flatten)]
        pub bucket: BucketWrites,
        /// A close or an fsync waits for the disks of two nodes, in place of the store; the nodes upload the file soon after
        ///
        /// With --rw of a bucket, through nodes with --stage-size. Folders that are to be written so through every mount
        /// have a rule: spurline limit FOLDER --stage.
        #[arg(long, help_heading = "Writing to a bucket")]
        pub stage: bool,
    }
}

#[cfg(feature = "clap")]
fn options_help() -> String {
    format!("Mount options: {}", option_list())
}

#[cfg(feature = "clap")]
fn options_long_help() -> String {
    format!(
        "{}\n\nallow_other brings default_permissions with it: the kernel then checks modes. Those of mount(8) and /etc/fstab \
         have no effect here: {}. The labels are those of SELinux. A comma inside a value is written as \\,, or the value in double \
         quotes.",
        options_help(),
        ignored_option_list()
    )
}

/// The FUSE session.
#[derive(Debug, Clone)]
pub struct FuseConfig {
    /// Locks hold among the programs of this mount only.
    pub local_locks: bool,
    /// Mount options, all from [`MOUNT_OPTIONS`], `fsname=` or [`LABEL_OPTIONS`].
    pub options: Vec<String>,
    /// Largest request in bytes: a multiple of 4 KiB, from 8 KiB to 1 MiB.
    pub max_write: u32,
    /// `--attr-cache`; divided by [`FuseConfig::cache_times`].
    pub attr_ttl: Duration,
    /// `--entry-cache`.
    pub entry_ttl: Duration,
    /// `--dir-entry-cache`.
    pub dir_entry_ttl: Duration,
    /// The transport of requests.
    pub io: FuseIo,
    /// Threads for kernel requests; `None` for as many as the budget's slots.
    pub threads: Option<usize>,
    /// Whether the kernel may read cached files directly.
    pub passthrough: bool,
    /// How far blocks are read ahead, in bytes; `None` for a part of the budget.
    pub readahead: Option<u64>,
    /// The kernel's read-ahead in bytes.
    pub kernel_readahead: u32,
    /// Permission bits of files, in place of the origin's.
    pub file_mode: Option<u16>,
    /// Permission bits of directories, in place of the origin's.
    pub dir_mode: Option<u16>,
    /// Owner of all files; `None` for the user that mounts.
    pub uid: Option<u32>,
    /// Group of all files; `None` for the group of the user that mounts.
    pub gid: Option<u32>,
}

/// Cache times of metadata per layer; the sums never exceed the flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheTimes {
    /// All metadata, in the layers between kernel and origin.
    pub behind: Duration,
    /// Attributes, in the kernel.
    pub attr: Duration,
    /// Names of files, in the kernel.
    pub entry: Duration,
    /// Names of directories, in the kernel.
    pub dir_entry: Duration,
    /// Absent names, in the kernel.
    pub absent: Duration,
}

impl FuseConfig {
    /// Divides the cache times. The layers below the kernel, where a single result carries a name and the attributes, get half of
    /// the shortest; the kernel gets the rest of each.
    pub fn cache_times(&self) -> CacheTimes {
        let behind = self.attr_ttl.min(self.entry_ttl).min(self.dir_entry_ttl) / 2;
        CacheTimes {
            behind,
            attr: self.attr_ttl - behind,
            // A lookup of the name detects a replaced file.
            entry: self.entry_ttl.min(self.attr_ttl) - behind,
            dir_entry: self.dir_entry_ttl - behind,
            // A new name may be a file or a directory.
            absent: self.attr_ttl.min(self.entry_ttl).min(self.dir_entry_ttl) - behind,
        }
    }
}

/// The kernel sends no request to a buffer smaller than this (FUSE_MIN_READ_BUFFER).
const MIN_MAX_WRITE: u64 = 8 << 10;
/// The kernel's largest request (FUSE_MAX_MAX_PAGES of 4 KiB).
const MAX_MAX_WRITE: u64 = 1 << 20;

impl RawFuse {
    /// The checked session.
    pub(crate) fn check(&self) -> Result<FuseConfig, Fault> {
        let max_write = self.max_write.bytes();
        // The kernel counts reads in pages, which may be larger than 4 KiB.
        let least = MIN_MAX_WRITE.max(rustix::param::page_size() as u64);
        if !max_write.is_multiple_of(4096) || !(least..=MAX_MAX_WRITE).contains(&max_write) {
            return Err(Fault::usage(
                format!("--max-write {} is not a multiple of 4K from {}K to 1M", self.max_write, least >> 10),
                "1M is the kernel's largest and the default",
            ));
        }
        let kernel_readahead = u32::try_from(self.kernel_readahead.bytes()).map_err(|_| {
            Fault::usage(format!("--kernel-readahead {} is above 4G", self.kernel_readahead), "8M is the default")
        })?;
        let threads = match self.fuse_threads {
            0 => None,
            n @ 1..=256 => Some(usize::from(n)),
            n => {
                return Err(Fault::usage(
                    format!("--fuse-threads {n} is above 256"),
                    "0 takes as many as --buffer-size has room for",
                ));
            }
        };
        let options = self.option_words();
        Ok(FuseConfig {
            local_locks: self.local_locks,
            options: check_options(&options)?,
            max_write: max_write as u32,
            attr_ttl: self.attr_cache,
            entry_ttl: self.entry_cache,
            dir_entry_ttl: self.dir_entry_cache,
            io: self.fuse_io,
            threads,
            passthrough: !self.no_passthrough,
            readahead: self.max_readahead.map(Size::bytes),
            kernel_readahead,
            file_mode: self.file_mode,
            dir_mode: self.dir_mode,
            uid: self.uid,
            gid: self.gid,
        })
    }

    fn option_words(&self) -> Vec<String> {
        self.options.iter().flat_map(|list| split_option_list(list)).collect()
    }

    /// The rule for the access times of the source, by the options.
    pub(crate) fn access_times(&self) -> AccessTimes {
        AccessTimes::of_options(self.option_words().iter().map(String::as_str))
    }

    /// Whether the mount takes changes, by flags and options.
    pub(crate) fn check_writes(&self) -> Result<Option<WritesConfig>, Fault> {
        let options = self.option_words();
        let word = |wanted: &str| options.iter().any(|word| word == wanted);
        let rw = self.rw || word("rw");
        let ro = self.read_only || word("ro");
        if rw && ro {
            return Err(Fault::usage(
                "both read-only and read-write are requested",
                "give --rw or --read-only, not both",
            ));
        }
        let writes = WritesConfig { squash: self.squash, bucket: self.bucket, stage: self.stage };
        if !rw {
            return match writes.given_flag().or(self.local_locks.then_some("--local-locks")) {
                None => Ok(None),
                Some(flag) => Err(Fault::usage(
                    format!("{flag} has no effect in a read-only mount"),
                    "give --rw too, or leave it out",
                )),
            };
        }
        let shown = [
            ("--uid", self.uid.is_some()),
            ("--gid", self.gid.is_some()),
            ("--file-mode", self.file_mode.is_some()),
            ("--dir-mode", self.dir_mode.is_some()),
        ];
        if let Some((flag, _)) = shown.iter().find(|(_, given)| *given) {
            return Err(Fault::usage(
                format!("{flag} does not go with --rw: a writable mount shows the source's own owners and modes"),
                "leave it out; --squash UID:GID makes all changes as one user",
            ));
        }
        Ok(Some(writes))
    }

    /// Checks that what `--recover` promises holds for this mount.
    pub(crate) fn check_recovery(&self) -> Result<(), Fault> {
        if self.recover && self.fuse_io == FuseIo::Uring {
            return Err(Fault::usage(
                "--recover does not go with --fuse-io uring: requests in the rings of a process are lost with that process",
                "leave --fuse-io out: a mount with --recover is served over /dev/fuse",
            ));
        }
        Ok(())
    }
}

/// The supported mount options without a value.
pub const MOUNT_OPTIONS: [&str; 15] = [
    "ro",
    "allow_other",
    "default_permissions",
    "no_default_permissions",
    "nonempty",
    "dev",
    "nodev",
    "suid",
    "nosuid",
    "exec",
    "noexec",
    "atime",
    "noatime",
    "relatime",
    "strictatime",
];
/// Options without effect here: the mode, which [`RawFuse::check_writes`] reads, options for mount(8), and options about writes and
/// the access times of directories.
const IGNORED_OPTIONS: [&str; 17] = [
    "rw",
    "defaults",
    "async",
    "lazytime",
    "norelatime",
    "_netdev",
    "nofail",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nodiratime",
    "sync",
    "dirsync",
];
/// Options of other FUSE file systems, with the remedy.
const FOREIGN_OPTIONS: [(&str, &str); 3] = [
    (
        "allow_root",
        "give -o allow_other: it admits root and all other users; modes are checked, unless no_default_permissions is given",
    ),
    (
        "auto_unmount",
        "leave it out: SIGTERM and SIGINT unmount, and spurline umount removes the mount of a killed process",
    ),
    (
        "remount",
        "mount -o remount,ro MOUNTPOINT and remount,rw change whether a mount takes changes; for other settings unmount it \
         (spurline umount MOUNTPOINT) and mount it again",
    ),
];

/// The supported mount options as a list for people.
pub fn option_list() -> String {
    let labels = LABEL_OPTIONS.map(|option| format!("{option}=LABEL")).join(", ");
    format!("rw, {}, fsname=NAME, {labels}", MOUNT_OPTIONS.join(", "))
}

/// The options that are accepted without effect, as a list for people.
pub fn ignored_option_list() -> String {
    let ignored: Vec<&str> = IGNORED_OPTIONS.into_iter().filter(|word| *word != "rw").collect();
    format!("{}, comment=TEXT, x-NAME", ignored.join(", "))
}

/// The remedy for an option of other FUSE file systems.
pub fn remedy_of_option(word: &str) -> Option<&'static str> {
    FOREIGN_OPTIONS.iter().find(|(not, _)| *not == word).map(|(_, remedy)| *remedy)
}

/// Whether [`FuseConfig`] has a meaning, or a special remedy, for a mount option.
pub fn is_known_option(word: &str) -> bool {
    is_kept(word) || is_ignored(word) || remedy_of_option(word).is_some()
}

fn is_kept(word: &str) -> bool {
    MOUNT_OPTIONS.contains(&word)
        || word.split_once('=').is_some_and(|(key, value)| {
            let label = LABEL_OPTIONS.contains(&key) && !value.contains('"');
            !value.is_empty() && (key == "fsname" || label)
        })
}

/// Whether an option is accepted without effect.
pub fn is_ignored(word: &str) -> bool {
    word.starts_with("x-") || word.starts_with("X-") || word.starts_with("comment=") || IGNORED_OPTIONS.contains(&word)
}

fn check_options(words: &[String]) -> Result<Vec<String>, Fault> {
    let mut kept = Vec::new();
    for word in words.iter().map(String::as_str) {
        if let Some(remedy) = remedy_of_option(word) {
            return Err(Fault::usage(format!("-o {word} is not supported"), remedy));
        }
        if is_ignored(word) {
            continue;
        }
        if is_kept(word) {
            if !kept.iter().any(|k| k == word) {
                kept.push(word.to_owned());
            }
            continue;
        }
        let remedy = match crate::values::nearest_word(word, MOUNT_OPTIONS.into_iter()) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("the options are {}", option_list()),
        };
        return Err(Fault::usage(format!("-o {word}: unknown mount option"), remedy));
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(attr_ms: u64, entry_ms: u64, dir_entry_ms: u64) -> FuseConfig {
        FuseConfig {
            local_locks: false,
            options: Vec::new(),
            max_write: 1 << 20,
            attr_ttl: Duration::from_millis(attr_ms),
            entry_ttl: Duration::from_millis(entry_ms),
            dir_entry_ttl: Duration::from_millis(dir_entry_ms),
            io: FuseIo::Auto,
            threads: None,
            passthrough: true,
            readahead: None,
            kernel_readahead: 0,
            file_mode: None,
            dir_mode: None,
            uid: None,
            gid: None,
        }
    }

    #[test]
    fn what_is_held_here_and_there_is_never_older_than_the_flags_say() {
        let all = [0, 1, 200, 1000, 60_000];
        for (attr, entry, dir_entry) in
            all.iter().flat_map(|a| all.map(|e| (a, e))).flat_map(|(a, e)| all.map(|d| (*a, e, d)))
        {
            let config = session(attr, entry, dir_entry);
            let times = config.cache_times();
            let said = format!("{config:?} {times:?}");
            // SEMANTICS.md, "Freshness": a replaced file; a removed file or directory; a new name.
            assert!(times.behind + times.attr <= config.attr_ttl, "{said}");
            assert!(times.behind + times.entry <= config.entry_ttl.min(config.attr_ttl), "{said}");
            assert!(times.behind + times.dir_entry <= config.dir_entry_ttl, "{said}");
            assert!(times.behind + times.absent <= config.entry_ttl.min(config.dir_entry_ttl), "{said}");
        }
        // Equal times are halved.
        let times = session(1000, 1000, 1000).cache_times();
        let half = Duration::from_millis(500);
        assert_eq!(times, CacheTimes { behind: half, attr: half, entry: half, dir_entry: half, absent: half });
    }

    #[test]
    fn a_mount_takes_changes_only_on_request() {
        let check = |change: fn(&mut RawFuse)| {
            let mut args = RawFuse::default();
            change(&mut args);
            args.check().and_then(|_| args.check_writes()).map_err(|fault| fault.to_string())
        };
        assert_eq!(check(|_| {}).unwrap(), None);
        assert_eq!(check(|args| args.rw = true).unwrap(), Some(WritesConfig::default()));
        assert_eq!(check(|args| args.options = vec!["noatime,rw".into()]).unwrap(), Some(WritesConfig::default()));
        let squashed = |args: &mut RawFuse| (args.rw, args.squash) = (true, Some((7, 8)));
        assert_eq!(check(squashed).unwrap(), Some(WritesConfig { squash: Some((7, 8)), ..WritesConfig::default() }));
        assert!(check(|args| args.squash = Some((7, 8))).unwrap_err().contains("--rw"));
        let staged = |args: &mut RawFuse| (args.rw, args.stage) = (true, true);
        assert!(check(staged).unwrap().unwrap().stage);
        assert!(check(|args| args.stage = true).unwrap_err().contains("--stage has no effect in a read-only mount"));
        assert!(check(|args| args.local_locks = true).unwrap_err().contains("--local-locks"));
        assert!(check(|args| (args.rw, args.read_only) = (true, true)).unwrap_err().contains("not both"));
        assert!(check(|args| (args.rw, args.options) = (true, vec!["ro".into()])).unwrap_err().contains("not both"));
        assert!(check(|args| (args.rw, args.uid) = (true, Some(1))).unwrap_err().contains("--uid"));
    }

    #[test]
    fn mount_options() {
        let check = |words: &str| check_options(&split_option_list(words));
        let kept =
            check("ro, allow_other,defaults,nodiratime,sync,dirsync,_netdev,x-systemd.automount,fsname=a,ro").unwrap();
        assert_eq!(kept, ["ro", "allow_other", "fsname=a"]);
        let of_fstab = check("nofail,comment=data of the lab,x-gvfs-show,X-mount.mkdir=0755,allow_other,").unwrap();
        assert_eq!(of_fstab, ["allow_other"], "and a comma at the end");
        assert_eq!(check(&MOUNT_OPTIONS.join(",")).unwrap(), MOUNT_OPTIONS);
        let labels = ["context=a:b:c:s0:c1,c2", "fscontext=a", "defcontext=b", "rootcontext=c"];
        assert_eq!(check(&labels.map(spurline_types::escape_option).join(",")).unwrap(), labels);
        for (words, says) in [
            ("allow_root", "allow_other"),
            ("auto_unmount", "spurline umount"),
            ("remount", "mount it again"),
            ("alow_other", "did you mean allow_other?"),
            ("fsname=", "fsname=NAME"),
            ("context=", "context=LABEL"),
        ] {
            let said = check(words).unwrap_err().to_string();
            assert!(said.contains(words) && said.contains(says), "{said}");
        }
    }
}
