//! What the NFS client of the kernel did: mounts, transports and connections, read from `/proc/self/mountstats`.

/// One NFS mount of this host.
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
    /// The server's address.
    pub address: String,
    /// Connections asked for by nconnect.
    pub asked_connections: usize,
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
    /// Its transport.
    pub transport: String,
    /// Requests sent.
    pub requests: u64,
}

/// The NFS mounts in the text of `/proc/self/mountstats`.
pub fn parse_mountstats(text: &str) -> Vec<NfsMount> {
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
                    let mountpoint = (*point).to_owned();
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
    mount.asked_connections = 1;
    for option in options.split(',') {
        match option.split_once('=') {
            Some(("vers", value)) => mount.version = value.to_owned(),
            Some(("proto", value)) => mount.transport = value.to_owned(),
            Some(("addr", value)) => mount.address = value.to_owned(),
            Some(("nconnect", value)) => mount.asked_connections = value.parse().unwrap_or(1),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "device rootfs mounted on / with fstype rootfs
device 10.77.0.1:/mnt mounted on /vmtmp/n4 with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,acregmin=3,hard,proto=rdma,nconnect=8,port=20049,timeo=600,sec=sys,clientaddr=10.77.0.1,local_lock=none,addr=10.77.0.1
\tage:\t3
\tbytes:\t300000 0 0 0 300000 7 74 0
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\trdma 0 0 1 0 24 15 15 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
device [fd00::1]:/a mounted on /b with fstype nfs statvers=1.1
\topts:\tro,vers=3,proto=tcp6,nconnect=2,addr=fd00::1
\txprt:\ttcp 855 1 1 0 0 9 9 0 9 0 2 0 0
\txprt:\ttcp 902 1 1 0 0 4 4 0 4 0 2 0 0
device tmpfs mounted on /x with fstype tmpfs
";

    #[test]
    fn mounts_with_their_transports_and_connections() {
        let mounts = parse_mountstats(TEXT);
        assert_eq!(mounts.len(), 2);
        let four = &mounts[0];
        assert_eq!((four.version.as_str(), four.transport.as_str(), four.asked_connections), ("4.2", "rdma", 8));
        assert_eq!(four.connections, [NfsConnection { transport: "rdma".into(), requests: 15 }]);
        assert_eq!((four.read_bytes, four.written_bytes), (300_000, 7));
        assert_eq!((mounts[1].server.as_str(), mounts[1].export.as_str()), ("fd00::1", "/a"));
        assert_eq!(mounts[1].connections.iter().map(|c| c.requests).sum::<u64>(), 13);
    }
}
