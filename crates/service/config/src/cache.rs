//! The block cache: settings and checks. Knows directories, sizes and which process keeps the cache; opens none.

use crate::host::HostLimits;
use crate::settings::{check_positive, unused_flags};
use crate::values::{CacheSize, IorpcMode, SourceUrl, absolute_path};
use spurline_types::fault::Fault;
use spurline_types::{Size, parse_duration};
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

settings! {
    /// The block cache.
    #[command(next_help_heading = "Cache")]
    pub struct RawCache {
        /// Cache directories, one per disk: A[:B…], globs allowed [default: a folder of its own in /var/cache/spurline,
        /// or ~/.cache/spurline when not root]
        #[arg(long, value_name = "DIR[:DIR]", value_delimiter = ':')]
        pub cache_dir: Vec<PathBuf>,
        /// Capacity of all cache disks together; -1 uses all available space, 0 disables the disk cache
        ///
        /// Mounts and nodes of one user without --cache-dir share this size: each has a folder of its own by source and
        /// mountpoint. The blocks of one that has ended stay for its next start, until others need their space.
        #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
        pub cache_size: CacheSize = CacheSize::from_str("100G"),
        /// Fraction of each cache disk that stays free
        #[arg(long, value_name = "RATIO")]
        pub free_space_ratio: f64 = 0.1,
        /// Unit of caching and placement; the same on all nodes of a group; mounts of a group use that of its nodes
        /// [default: 4M]
        #[arg(long, value_name = "SIZE")]
        pub block_size: Option<Size>,
        /// How to read cache disks; a node with RDMA rails uses dio instead of splice
        #[arg(long, value_name = "MODE", value_enum, default_value_t)]
        pub iorpc_mode: IorpcMode,
        /// Stop using a cache disk when a read takes longer than this (a write: twice as long)
        #[arg(long, value_name = "TIME")]
        pub disk_timeout: Duration = parse_duration("5s"),
    }
}

/// The block cache.
#[derive(Debug, Clone)]
pub struct CacheConfig {
    /// Cache directories: absolute, globs expanded, no duplicates; empty without a disk cache.
    pub dirs: Vec<PathBuf>,
    /// Whether the directory is the default: a folder in a directory that all processes of the user share, as they share the
    /// size.
    pub is_default: bool,
    /// Capacity over all directories.
    pub size: CacheSize,
    /// Whether that is the default size.
    pub is_default_size: bool,
    /// The fraction of each disk to leave free; 0 to 0.99.
    pub free_space_ratio: f64,
    /// Block size in bytes: a power of two from 64 KiB to 64 MiB.
    pub block_size: u64,
    /// I/O mode of disk reads.
    pub iorpc_mode: IorpcMode,
    /// Deadline of a disk request.
    pub disk_timeout: Duration,
    /// The warning about given flags of a writable mount whose source is on this host: such a mount has no cache.
    pub near_source_warning: Option<String>,
}

/// Block size limits: below, the index outgrows the data; above, a miss fetches too much.
const BLOCK_RANGE: (u64, u64) = (64 << 10, 64 << 20);

/// Which process keeps blocks on disks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CachePlace {
    /// This process.
    Here,
    /// The nodes of the group.
    Nodes,
    /// This process, if the source that it changes turns out to be on a network file system. Otherwise reads go to the
    /// source's files.
    HereForNetwork {
        /// The process as warnings name it.
        writer: &'static str,
    },
}

/// The name of the cache folder of a node in the default directory.
pub(crate) const NODE_FOLDER: &str = "node";
/// The most bytes of a mountpoint in the name of a cache folder.
const SHOWN_PLACE_LEN: usize = 60;

/// The name of a reader's cache folder in the default directory: the same for the same source and place, and different for
/// others.
pub(crate) fn reader_folder(source: &SourceUrl, place: &str) -> String {
    let number = xxh3_64(format!("{source}\0{place}").as_bytes());
    let shown: String = place.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).collect();
    let shown = shown.trim_matches('-');
    let from = shown.len().saturating_sub(SHOWN_PLACE_LEN);
    format!("{}-{number:016x}", &shown[from..])
}

impl RawCache {
    /// The block size given, or the default.
    fn block_size(&self) -> Size {
        self.block_size.unwrap_or(Size::mib(4))
    }

    /// The checked cache, and warnings about flags that have no effect. `folder`: the name in the default cache folder.
    pub(crate) fn check(
        &self,
        host: &HostLimits,
        place: CachePlace,
        folder: &str,
        warnings: &mut Vec<String>,
    ) -> Result<CacheConfig, Fault> {
        let block = self.block_size().bytes();
        if !block.is_power_of_two() || block < BLOCK_RANGE.0 || block > BLOCK_RANGE.1 {
            return Err(Fault::usage(
                format!("--block-size {} is not a power of two from 64K to 64M", self.block_size()),
                "4M is the default; 1M suits small random reads",
            ));
        }
        let ratio = self.free_space_ratio;
        if !(0.0..=0.99).contains(&ratio) {
            return Err(Fault::usage(
                format!("--free-space-ratio {ratio} is not from 0 to 0.99"),
                "0.1 leaves a tenth of the disk free",
            ));
        }
        let used = place != CachePlace::Nodes && self.cache_size != CacheSize::None;
        let dirs = match (used, self.cache_dir.is_empty()) {
            (false, _) => Vec::new(),
            (true, false) => expand_dirs(&self.cache_dir)?,
            (true, true) => match default_cache_dir(host) {
                Ok(dir) => vec![dir.join(folder)],
                // It may never be needed.
                Err(_) if matches!(place, CachePlace::HereForNetwork { .. }) => Vec::new(),
                Err(fault) => return Err(fault),
            },
        };
        if place == CachePlace::Nodes {
            warnings.extend(self.unused_flags("with --registry the nodes hold the cache"));
        }
        let near_source_warning = match place {
            CachePlace::HereForNetwork { writer } => {
                let why = format!("{writer} has no block cache where the source is a directory of this host");
                self.unused_flags(&why)
            }
            CachePlace::Here | CachePlace::Nodes => None,
        };
        if place == CachePlace::Nodes
            && let Some(size) = self.block_size
        {
            warnings.push(format!("--block-size {size} is not used: with --registry the nodes decide the block size"));
        }
        check_positive("--disk-timeout", self.disk_timeout)?;
        if place != CachePlace::Nodes && self.iorpc_mode == IorpcMode::Splice {
            warnings.extend(check_pipes(host));
        }
        Ok(CacheConfig {
            is_default: used && self.cache_dir.is_empty(),
            dirs,
            size: if used { self.cache_size } else { CacheSize::None },
            is_default_size: self.cache_size == RawCache::default().cache_size,
            free_space_ratio: ratio,
            block_size: block,
            iorpc_mode: self.iorpc_mode,
            disk_timeout: self.disk_timeout,
            near_source_warning,
        })
    }

    /// The warning about given flags of a cache that this process does not keep.
    fn unused_flags(&self, why: &str) -> Option<String> {
        let own = RawCache::default();
        let unused = [
            ("--cache-dir", !self.cache_dir.is_empty()),
            ("--cache-size", self.cache_size != own.cache_size && self.cache_size != CacheSize::None),
            ("--free-space-ratio", self.free_space_ratio != own.free_space_ratio),
            ("--iorpc-mode", self.iorpc_mode != own.iorpc_mode),
            ("--disk-timeout", self.disk_timeout != own.disk_timeout),
        ];
        unused_flags(&unused, why)
    }
}

impl CacheConfig {
    /// The same without cache directories.
    pub fn without_dirs(&self) -> CacheConfig {
        CacheConfig { dirs: Vec::new(), is_default: false, size: CacheSize::None, ..self.clone() }
    }
}

/// The pipe of a `sendfile`, in the kernel; larger pipes are not used.
const SENDFILE_PIPE: u64 = 64 << 10;
/// The pipe for other systems' splice modes, which keep a whole block in a pipe.
const SPLICE_PIPE: u64 = 8 << 20;

/// What `fs.pipe-max-size` means for `--iorpc-mode splice`, where that may be in question.
fn check_pipes(host: &HostLimits) -> Option<String> {
    let limit = host.pipe_max_size.filter(|limit| *limit < SPLICE_PIPE)?;
    Some(if limit < SENDFILE_PIPE && !host.root {
        format!(
            "--iorpc-mode splice: fs.pipe-max-size is {limit}, so sendfile moves less than {SENDFILE_PIPE} bytes at a \
             time: sysctl -w fs.pipe-max-size={SPLICE_PIPE}"
        )
    } else {
        format!(
            "--iorpc-mode splice: fs.pipe-max-size is {limit}; that is enough for sendfile, which is used here (splice \
             in JuiceFS needs {SPLICE_PIPE})"
        )
    })
}

/// The folder of the caches of all processes of this user that name no cache directory.
///
/// # Errors
/// When the home directory of a user is not known.
pub fn default_cache_dir(host: &HostLimits) -> Result<PathBuf, Fault> {
    if host.root {
        return Ok(PathBuf::from("/var/cache/spurline"));
    }
    let home = host.home.as_ref().ok_or_else(|| {
        Fault::usage("there is no default cache directory: HOME is not set", "give --cache-dir, or --cache-size 0")
    })?;
    Ok(home.join(".cache/spurline"))
}

fn expand_dirs(patterns: &[PathBuf]) -> Result<Vec<PathBuf>, Fault> {
    let mut dirs: Vec<PathBuf> = Vec::new();
    for pattern in patterns {
        let path = absolute_path(pattern);
        let text = path.to_string_lossy();
        let found = if text.contains(['*', '?', '[']) {
            let paths = glob::glob(&text).map_err(|e| {
                Fault::usage(
                    format!("--cache-dir '{text}' is not a valid pattern: {e}"),
                    "quote it, or list the directories",
                )
            })?;
            let found: Vec<PathBuf> = paths.filter_map(Result::ok).filter(|p| p.is_dir()).collect();
            if found.is_empty() {
                return Err(Fault::usage(
                    format!("--cache-dir '{text}' matches no directory"),
                    "make the directories first, or name them without a pattern",
                ));
            }
            found
        } else {
            vec![path]
        };
        for dir in found {
            if !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
    }
    Ok(dirs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RawGateway, RawMount, RawNode};

    #[test]
    fn each_source_and_mountpoint_has_a_default_folder_of_its_own() {
        let host = HostLimits { root: true, ..HostLimits::detect() };
        let cache = |source: &str, at: &str, dir: Option<&str>| {
            let mut raw = RawMount::new(source.parse().unwrap(), at.into());
            raw.volume.cache.cache_dir = dir.into_iter().map(PathBuf::from).collect();
            raw.check(&host).unwrap().volume.cache
        };
        let first = cache("/srv", "/mnt/a b", None);
        let again = cache("/srv", "/mnt/a b", None);
        assert_eq!((first.dirs.len(), first.is_default, &first.dirs), (1, true, &again.dirs));
        let name = first.dirs[0].strip_prefix("/var/cache/spurline").unwrap().to_str().unwrap();
        assert!(name.starts_with("mnt-a-b-") && name.len() == "mnt-a-b-".len() + 16, "{name}");
        assert_ne!(cache("/srv", "/mnt/a-b", None).dirs, first.dirs);
        assert_ne!(cache("/srv/x", "/mnt/a b", None).dirs, first.dirs);
        let long = format!("/{}/end", "x".repeat(200));
        assert!(cache("/srv", &long, None).dirs[0].file_name().unwrap().len() < 100);
        let given = cache("/srv", "/mnt/a b", Some("/given"));
        assert!(!given.is_default && given.dirs == [PathBuf::from("/given")]);
        let node = RawNode::new(vec!["/srv".parse().unwrap()]).check(&host).unwrap().cache;
        assert!(node.is_default && node.dirs == [PathBuf::from("/var/cache/spurline/node")]);
    }

    #[test]
    fn flags_of_the_cache_are_in_vain_where_the_source_of_a_writable_mount_is_near() {
        let host = HostLimits { root: true, ..HostLimits::detect() };
        let given = PathBuf::from("/given");
        let source = || "/srv".parse().unwrap();
        let cache = |rw, dirs: &[PathBuf]| {
            let mut raw = RawMount::new(source(), "/mnt".into());
            raw.fuse.rw = rw;
            raw.volume.cache.cache_dir = dirs.to_vec();
            let volume = raw.check(&host).unwrap().volume;
            assert!(volume.warnings.is_empty(), "the source decides");
            volume.cache
        };
        assert_eq!(cache(false, std::slice::from_ref(&given)).near_source_warning, None);
        // It may be on a network file system.
        let writable = cache(true, &[]);
        assert_eq!((writable.dirs.len(), writable.near_source_warning.as_ref()), (1, None));
        let named = cache(true, std::slice::from_ref(&given));
        let said = named.near_source_warning.as_deref().unwrap_or_default();
        assert!(
            named.dirs == [given.clone()] && said.starts_with("--cache-dir is not used: a mount with --rw"),
            "{said}"
        );
        let mut gateway = RawGateway::new(source());
        gateway.writable = true;
        gateway.volume.cache.cache_dir = vec![given.clone()];
        gateway.s3.s3_listen = Some("127.0.0.1:0".parse().unwrap());
        gateway.s3.s3_writable_without_keys = true;
        let said = gateway.check(&host).unwrap().volume.cache.near_source_warning.unwrap();
        assert!(said.starts_with("--cache-dir is not used: a gateway with --writable has no block cache"), "{said}");
        let without = named.without_dirs();
        assert!(without.dirs.is_empty() && without.size == CacheSize::None);
        // A node that takes changes serves readers too.
        let mut node = RawNode::new(vec![source()]);
        (node.writable, node.cache.cache_dir) = (true, vec![given.clone()]);
        assert_eq!(node.check(&host).unwrap().cache.dirs, [given]);
    }
}
