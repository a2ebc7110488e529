//! The use of an export, as shown by the kernel's NFS server: admitted clients and moved bytes. Knows no mount, and starts
//! nothing.

use crate::kernel_server::{decode_path, trim_mapped};
use std::collections::BTreeSet;
use std::path::Path;

/// The server's counters of an export. All is zero while nothing is exported there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExportUse {
    /// The server has the export.
    pub active: bool,
    /// The export is writable for some client.
    pub writable: bool,
    /// Addresses of admitted clients. Two exports for the same network share clients: the kernel knows an address only by the
    /// words of exports(5) that admitted it.
    pub clients: BTreeSet<String>,
    /// Bytes read by clients, since the server took up the export.
    pub read_bytes: u64,
    /// Bytes written by clients, since the server took up the export.
    pub write_bytes: u64,
    /// Requests whose file handle led to no file.
    pub stale_handles: u64,
}

impl ExportUse {
    /// Reads the use from `proc` below `root`.
    pub fn read(root: &Path, mountpoint: &Path) -> ExportUse {
        let mut found = ExportUse::default();
        let mut domains = BTreeSet::new();
        // Lines of clients that were refused, or whose time is over, begin with #.
        for line in read_below(root, "proc/net/rpc/nfsd.export/content").lines().filter(|line| !line.starts_with('#')) {
            let mut words = line.split_whitespace();
            if !is_word_of_path(mountpoint, words.next()) {
                continue;
            }
            let Some((domain, options)) = words.next().and_then(|word| word.split_once('(')) else { continue };
            found.active = true;
            found.writable |= options.trim_end_matches(')').split(',').any(|word| word == "rw");
            domains.insert(domain.to_owned());
        }
        for line in read_below(root, "proc/net/rpc/auth.unix.ip/content").lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let ["nfsd", address, domain] = words[..]
                && domains.contains(domain)
            {
                found.clients.insert(trim_mapped(address).to_owned());
            }
        }
        // A block for each path and domain; Linux 5.13.
        let mut own = false;
        for line in read_below(root, "proc/fs/nfsd/export_stats").lines().filter(|line| !line.starts_with('#')) {
            if !line.starts_with(char::is_whitespace) {
                own = is_word_of_path(mountpoint, line.split_whitespace().next());
                continue;
            }
            let Some((name, value)) = line.trim().split_once(": ").filter(|_| own) else { continue };
            let value: u64 = value.parse().unwrap_or(0);
            match name {
                "fh_stale" => found.stale_handles += value,
                "io_read" => found.read_bytes += value,
                "io_write" => found.write_bytes += value,
                _ => {}
            }
        }
        found
    }
}

fn read_below(root: &Path, path: &str) -> String {
    std::fs::read_to_string(root.join(path)).unwrap_or_default()
}

fn is_word_of_path(mountpoint: &Path, word: Option<&str>) -> bool {
    word.is_some_and(|word| Path::new(&decode_path(word)) == mountpoint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_has_its_own_clients_and_bytes() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let read = |at: &str| ExportUse::read(root.path(), Path::new(at));
        assert_eq!(read("/mnt/a b"), ExportUse::default());
        // As Linux 6.1 shows it.
        write(
            "proc/net/rpc/nfsd.export/content",
            "#path domain(flags)\n/mnt/a\\040b\t10.77.0.0/16(rw,no_root_squash,sync,wdelay,sec=1)\n\
             /mnt/a\\040b\t*(ro,root_squash,sync)\n/mnt/c\t10.78.0.0/16(ro,root_squash,sync)\n# /mnt/c\t10.79.0.0/16()\n",
        );
        write(
            "proc/net/rpc/auth.unix.ip/content",
            "#class IP domain\nnfsd 10.77.0.1 10.77.0.0/16\nnfsd ::ffff:192.0.2.1 *\nnfsd 10.78.0.4 10.78.0.0/16\n# nfsd 10.9.9.9 -\n",
        );
        write(
            "proc/fs/nfsd/export_stats",
            "# Version 1.1\n# Path Client Start-time\n#\tStats\n/mnt/a\\040b\t10.77.0.0/16\t24\n\tfh_stale: 1\n\tio_read: 4096\n\
             \tio_write: 7\n\n/mnt/c\t10.78.0.0/16\t24\n\tfh_stale: 2\n\tio_read: 5\n\tio_write: 0\n\n\
             /mnt/a\\040b\t*\t25\n\tfh_stale: 2\n\tio_read: 4\n\tio_write: 0\n\n",
        );
        let of = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<BTreeSet<_>>();
        let clients = of(&["10.77.0.1", "192.0.2.1"]);
        let both =
            ExportUse { active: true, writable: true, clients, read_bytes: 4100, write_bytes: 7, stale_handles: 3 };
        assert_eq!(read("/mnt/a b"), both);
        let other = read("/mnt/c");
        assert_eq!((other.writable, other.clients, other.read_bytes), (false, of(&["10.78.0.4"]), 5));
        assert_eq!(read("/mnt"), ExportUse::default());
    }
}
