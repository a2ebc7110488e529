//! The statistics of the kernel's NFS client: mounts, the servers' addresses, transports and connections. Asks no server.

use crate::kernel_server::decode_path;
use spurline_sys::MountTable;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// An NFS mount of this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NfsMount {
    /// The server's name or address, as mounted.
    pub server: String,
    /// The exported path.
    pub export: String,
    /// The mountpoint here.
    pub mountpoint: String,
    /// The version: 3, 4.1, 4.2.
    pub version: String,
    /// The transport asked for: tcp, rdma.
    pub transport: String,
    /// The server's addresses: that of the mount, and those with the same connections.
    pub addresses: BTreeSet<IpAddr>,
    /// Connections that the kernel made.
    pub connections: Vec<NfsConnection>,
    /// Bytes read from and written to the server.
    pub read_bytes: u64,
    /// Bytes written to the server.
    pub written_bytes: u64,
}

/// A connection of an NFS mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NfsConnection {
    /// The transport.
    pub transport: String,
    /// Requests sent.
    pub requests: u64,
}

impl NfsMount {
    /// The NFS mounts of the host whose files are below `root`.
    ///
    /// # Errors
    /// When the kernel's statistics can't be read.
    pub fn read_all(root: &Path) -> std::io::Result<Vec<NfsMount>> {
        let statistics = std::fs::read(root.join("proc/self/mountstats"))?;
        let mut mounts = parse_mountstats(&String::from_utf8_lossy(&statistics));
        let table = MountTable::read_file(&root.join("proc/self/mountinfo")).unwrap_or_default();
        add_addresses(&mut mounts, &table, &trunked_addresses(root));
        Ok(mounts)
    }

    /// Whether this is a mount of the server `host`, which has these addresses.
    pub fn is_of(&self, host: &str, addresses: &[IpAddr]) -> bool {
        let literal = self.server.parse::<IpAddr>().ok();
        self.server.eq_ignore_ascii_case(host)
            || addresses.iter().any(|address| self.addresses.contains(address) || literal == Some(*address))
    }

    /// Whether the kernel opens a single connection for each address, whatever the value of nconnect.
    pub fn ignores_nconnect(&self) -> bool {
        self.version.starts_with('4') && self.transport.starts_with("rdma")
    }
}

/// Addresses that are reached through the same connections, as shown by Linux 5.15 and later: the mounts of several rails of a server
/// all have the address of the first.
fn trunked_addresses(root: &Path) -> Vec<BTreeSet<IpAddr>> {
    let switches = subfolders(&root.join("sys/kernel/sunrpc/xprt-switches"));
    switches
        .iter()
        .map(|switch| subfolders(switch).iter().filter_map(|path| destination_address(path)).collect())
        .collect()
}

fn subfolders(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect::<Vec<_>>()
}

fn destination_address(path: &Path) -> Option<IpAddr> {
    std::fs::read_to_string(path.join("dstaddr")).ok()?.trim().parse().ok()
}

/// Adds the servers' addresses, which `/proc/self/mountstats` does not show.
fn add_addresses(mounts: &mut [NfsMount], table: &MountTable, trunked: &[BTreeSet<IpAddr>]) {
    for entry in table.entries().iter().filter(|entry| entry.fstype.starts_with("nfs")) {
        let Some(address) = entry.option("addr").and_then(|address| address.parse::<IpAddr>().ok()) else { continue };
        let at = entry.mountpoint.to_string_lossy();
        for mount in mounts.iter_mut().filter(|mount| mount.mountpoint == at) {
            mount.addresses.insert(address);
            for together in trunked.iter().filter(|together| together.contains(&address)) {
                mount.addresses.extend(together);
            }
        }
    }
}

/// The NFS mounts in the text of `/proc/self/mountstats`.
fn parse_mountstats(text: &str) -> Vec<NfsMount> {
    let mut mounts: Vec<NfsMount> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("device") => {
                let fields: Vec<&str> = line.split_whitespace().collect();
                // device SERVER:PATH mounted on POINT with fstype nfs4 statvers=1.1
                let kind = fields.iter().position(|w| *w == "fstype").and_then(|at| fields.get(at + 1));
                inside = matches!(kind, Some(&("nfs" | "nfs4")));
                if let (true, Some(device), Some(point)) = (inside, fields.get(1), fields.get(4)) {
                    let (server, export) = split_device(device);
                    let export = decode_path(&export);
                    let mountpoint = decode_path(point);
                    mounts.push(NfsMount { server, export, mountpoint, ..NfsMount::default() });
                }
            }
            Some(word) if inside => {
                let Some(mount) = mounts.last_mut() else { continue };
                match word {
                    "opts:" => read_options(mount, line.split_once("opts:").map_or("", |(_, rest)| rest.trim())),
                    "bytes:" => {
                        let numbers: Vec<u64> = words.filter_map(|w| w.parse().ok()).collect();
                        mount.read_bytes = numbers.get(4).copied().unwrap_or(0);
                        mount.written_bytes = numbers.get(5).copied().unwrap_or(0);
                    }
                    "xprt:" => {
                        let fields: Vec<&str> = words.collect();
                        let Some(transport) = fields.first() else { continue };
                        // TCP and RDMA: port, binds, connects, connect time, idle time, sends.
                        let requests = fields.get(6).and_then(|w| w.parse().ok()).unwrap_or(0);
                        mount.connections.push(NfsConnection { transport: (*transport).to_owned(), requests });
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    mounts
}

/// `[fd00::1]:/path` or `host:/path`.
fn split_device(device: &str) -> (String, String) {
    let at = device.find(":/").unwrap_or(device.len());
    let server = device[..at].trim_start_matches('[').trim_end_matches(']').to_owned();
    (server, device.get(at + 1..).unwrap_or("").to_owned())
}

fn read_options(mount: &mut NfsMount, options: &str) {
    for option in options.split(',') {
        match option.split_once('=') {
            Some(("vers", value)) => mount.version = value.to_owned(),
            Some(("proto", value)) => mount.transport = value.to_owned(),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Linux 6.1 shows it, without the counters of operations: two rails with `max_connect`, of which the kernel shows the
    /// first one's address; NFSv3 and NFSv4.2 with `nconnect=4`, the first after a mount with one connection.
    const STATISTICS: &str = "device rootfs mounted on / with fstype rootfs
device nfsd mounted on /proc/fs/nfsd with fstype nfsd
device 10.77.0.1:/ram mounted on /vmtmp/k1 with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=262144,wsize=262144,namlen=255,acregmin=3,acregmax=60,acdirmin=30,acdirmax=60,hard,proto=rdma,max_connect=2,port=20049,timeo=600,retrans=2,sec=sys,clientaddr=10.77.0.1,local_lock=none
\tage:\t1
\timpl_id:\tname='',domain='',date='0,0'
\tcaps:\tcaps=0xcffbc0bf,wtmult=512,dtsize=262144,bsize=0,namlen=255
\tevents:\t0 0 0 0 0 0 5 0 0 1 0 0 0 0 2 0 0 2 0 0 0 0 0 0 0 0 0 
\tbytes:\t4 0 0 0 2 0 1 0 
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\trdma 0 0 1 0 0 37 37 0 37 0 0 1 4 26804 882 0 0 48600 0 0 0 0 0 11 0 0 0
\txprt:\trdma 0 0 1 0 0 9 9 0 9 0 0 0 0 0 0 0 0 18612 0 0 0 0 0 11 0 0 0
\tper-op statistics
\t        NULL: 2 2 0 80 48 51 1 58 0
\t        READ: 1 1 0 180 108 0 0 1 0

device server1:/ram mounted on /vmtmp/k2 with fstype nfs statvers=1.1
\topts:\trw,vers=3,rsize=262144,wsize=262144,namlen=255,acregmin=3,acregmax=60,acdirmin=30,acdirmax=60,hard,nolock,nosharecache,proto=tcp,timeo=600,retrans=2,sec=sys,mountaddr=10.77.0.1,mountvers=3,mountport=53791,mountproto=tcp,local_lock=all
\tbytes:\t2 0 0 0 2 0 1 0 
\tRPC iostats version: 1.1  p/v: 100003/3 (nfs)
\txprt:\ttcp 772 1 2 0 0 21 21 0 21 0 2 0 0
device server1:/ram mounted on /vmtmp/k3 with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=262144,wsize=262144,namlen=255,acregmin=3,acregmax=60,acdirmin=30,acdirmax=60,hard,proto=tcp,nconnect=4,timeo=600,retrans=2,sec=sys,clientaddr=10.77.0.1,local_lock=none
\tbytes:\t2 0 0 0 2 0 1 0 
\txprt:\ttcp 0 0 2 0 0 12 12 0 12 0 2 0 0
\txprt:\ttcp 0 0 2 0 0 5 5 0 5 0 2 0 0
\txprt:\ttcp 0 0 2 0 0 5 5 0 5 0 2 0 0
\txprt:\ttcp 0 0 2 0 0 4 4 0 4 0 2 0 0
";

    const TABLE: &str = "37 32 0:34 / /proc/fs/nfsd rw,relatime - nfsd nfsd rw
41 35 0:37 / /vmtmp/k1 rw,relatime - nfs4 10.77.0.1:/ram rw,vers=4.2,rsize=262144,wsize=262144,namlen=255,hard,proto=rdma,max_connect=2,port=20049,timeo=600,retrans=2,sec=sys,clientaddr=10.77.0.1,local_lock=none,addr=10.77.0.1
40 35 0:37 / /vmtmp/k2 rw,relatime - nfs server1:/ram rw,vers=3,rsize=262144,wsize=262144,namlen=255,hard,nolock,nosharecache,proto=tcp,timeo=600,retrans=2,sec=sys,mountaddr=10.77.0.1,mountvers=3,mountport=53791,mountproto=tcp,local_lock=all,addr=10.77.0.1
";

    #[test]
    fn mounts_with_their_transports_and_connections() {
        let mounts = parse_mountstats(STATISTICS);
        assert_eq!(mounts.len(), 3);
        let four = &mounts[0];
        assert_eq!((four.version.as_str(), four.transport.as_str()), ("4.2", "rdma"));
        let rdma = |requests| NfsConnection { transport: "rdma".into(), requests };
        assert_eq!(four.connections, [rdma(37), rdma(9)]);
        assert_eq!((four.read_bytes, four.written_bytes), (2, 0));
        assert!(four.ignores_nconnect() && !mounts[1].ignores_nconnect() && !mounts[2].ignores_nconnect());
        assert_eq!((mounts[1].server.as_str(), mounts[1].export.as_str()), ("server1", "/ram"));
        assert_eq!((mounts[1].version.as_str(), mounts[1].connections.len()), ("3", 1));
        assert_eq!(mounts[2].connections.iter().map(|c| c.requests).sum::<u64>(), 26);
        assert_eq!(split_device("[fd00::1]:/a"), ("fd00::1".to_owned(), "/a".to_owned()));
    }

    #[test]
    fn a_server_is_found_by_its_name_and_by_each_of_its_addresses() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/self/mountstats", STATISTICS);
        write("proc/self/mountinfo", TABLE);
        let found = |host: &str, addresses: &[&str]| -> Vec<String> {
            let addresses: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
            let mounts = NfsMount::read_all(root.path()).unwrap();
            mounts.into_iter().filter(|m| m.is_of(host, &addresses)).map(|m| m.mountpoint).collect()
        };
        assert_eq!(found("server1", &["10.77.0.1"]), ["/vmtmp/k1", "/vmtmp/k2", "/vmtmp/k3"]);
        assert_eq!(found("10.77.0.1", &["10.77.0.1"]), ["/vmtmp/k1", "/vmtmp/k2"]);
        assert!(found("10.77.1.1", &["10.77.1.1"]).is_empty());
        let switches = "sys/kernel/sunrpc/xprt-switches";
        write(&format!("{switches}/switch-0/xprt-0-local/dstaddr"), "/var/run/rpcbind.sock\n");
        write(&format!("{switches}/switch-1/xprt-1-rdma/dstaddr"), "10.77.0.1\n");
        write(&format!("{switches}/switch-1/xprt-5-rdma/dstaddr"), "10.77.1.1\n");
        assert_eq!(found("10.77.1.1", &["10.77.1.1"]), ["/vmtmp/k1", "/vmtmp/k2"]);
        assert!(found("other", &["192.0.2.1"]).is_empty());
    }
}
