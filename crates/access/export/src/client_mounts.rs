//! The lines that a client types to mount an export, for each version and transport.

use spurline_fabric::HostFacts;
use std::net::IpAddr;
use std::path::Path;

/// Connections of a TCP mount, and the most that a stock kernel makes.
const TCP_MOUNT_CONNECTIONS: usize = 8;

/// The largest read and write that clients ask for; the server may answer with less.
const CLIENT_REQUEST_BYTES: u32 = 1 << 20;

/// Where clients mount the export.
const CLIENT_MOUNTPOINT: &str = "/mnt/spurline";

/// The services of an export for clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportService {
    /// NFSv4.2 is served.
    pub v4: bool,
    /// NFSv3 is served.
    pub v3: bool,
    /// The kernel grants locks of NFSv3 clients.
    pub v3_locks: bool,
    /// The port of RDMA, if RDMA is served.
    pub rdma_port: Option<u16>,
}

/// A client's mount command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientMount {
    /// The version and transport.
    pub title: String,
    /// The command.
    pub command: String,
    /// A note; may be empty.
    pub note: String,
}

/// Addresses of this host that clients can reach: all, and an address of each RDMA interface.
pub fn reach_of(host: &HostFacts) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let mut all = Vec::new();
    let mut rails = Vec::new();
    for interface in host.interfaces.iter().filter(|i| i.is_up) {
        let mut own: Vec<IpAddr> = interface
            .addresses
            .iter()
            .map(|(ip, _)| *ip)
            .filter(|ip: &IpAddr| {
                !ip.is_loopback()
                    && match ip {
                        IpAddr::V4(_) => true,
                        // Link-local addresses need an interface on the client.
                        IpAddr::V6(v6) => !v6.is_unicast_link_local(),
                    }
            })
            .collect();
        own.sort_by_key(IpAddr::is_ipv6);
        if interface.rdma.is_some() {
            rails.extend(own.first());
        }
        all.extend(own);
    }
    all.sort_by_key(IpAddr::is_ipv6);
    (all, rails)
}

/// A note beside the commands of NFSv3.
const NO_LOCKS: &str = "locks fail with ENOLCK by NFSv3: use NFSv4, or mount the source with --local-locks";

/// The commands for clients of an export at `mountpoint`.
pub fn client_mounts(
    mountpoint: &Path,
    addresses: &[IpAddr],
    rails: &[IpAddr],
    service: ExportService,
) -> Vec<ClientMount> {
    let v3_note = if service.v3_locks { "" } else { NO_LOCKS };
    let target_at = |ip: Option<&IpAddr>, at: &str| {
        let host =
            ip.map_or_else(|| "SERVER".to_owned(), |ip| if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() });
        let path = mountpoint.display().to_string();
        let quote = if path.contains(|c: char| c.is_whitespace() || "'\"\\$`".contains(c)) { "'" } else { "" };
        format!("{quote}{host}:{path}{quote} {at}")
    };
    let target = |ip: Option<&IpAddr>| target_at(ip, CLIENT_MOUNTPOINT);
    let tcp = target(addresses.first());
    let mut lines = Vec::new();
    if service.v4 {
        lines.push(client_mount(
            "NFSv4.2, TCP",
            &format!("vers=4.2,proto=tcp,nconnect={TCP_MOUNT_CONNECTIONS}"),
            &tcp,
            "",
        ));
    }
    if service.v3 {
        lines.push(client_mount(
            "NFSv3, TCP",
            &format!("vers=3,proto=tcp,nconnect={TCP_MOUNT_CONNECTIONS}"),
            &tcp,
            v3_note,
        ));
    }
    let Some(port) = service.rdma_port else { return lines };
    let rail = target(rails.first().or(addresses.first()));
    if service.v4 {
        lines.push(client_mount(
            "NFSv4.2, RDMA",
            &format!("vers=4.2,proto=rdma,port={port}"),
            &rail,
            "the kernel ignores nconnect for NFSv4 over RDMA, and stays with TCP where the client has mounted this server by \
             NFSv4 over TCP already",
        ));
    }
    if service.v3 {
        lines.push(client_mount(
            "NFSv3, RDMA",
            &format!("vers=3,proto=rdma,port={port},mountproto=tcp"),
            &rail,
            v3_note,
        ));
    }
    if rails.len() > 1 {
        let max = rails.len();
        for (n, ip) in rails.iter().enumerate().filter(|_| service.v4) {
            let title = format!("NFSv4.2, RDMA, rail {} of {max}", n + 1);
            let at = if n == 0 { CLIENT_MOUNTPOINT.to_owned() } else { format!("{CLIENT_MOUNTPOINT}-rail{}", n + 1) };
            let options = format!("vers=4.2,proto=rdma,port={port},max_connect={max}");
            let note = "mount it through each address: the connections are then shared. Stock kernels do not fail over \
                        from one rail to another";
            lines.push(client_mount(&title, &options, &target_at(Some(ip), &at), if n == 0 { note } else { "" }));
        }
        let same_family: Vec<String> =
            rails.iter().filter(|ip| ip.is_ipv4() == rails[0].is_ipv4()).map(ToString::to_string).collect();
        if !service.v3 {
            return lines;
        }
        lines.push(client_mount(
            "NFSv3, RDMA, several rails with VAST's client",
            &format!(
                "vers=3,proto=rdma,port={port},nconnect={},remoteports={}",
                TCP_MOUNT_CONNECTIONS.max(max),
                same_family.join("~")
            ),
            &rail,
            "only the client package of VAST (vastnfs) knows remoteports",
        ));
    }
    lines
}

fn client_mount(title: &str, options: &str, target: &str, note: &str) -> ClientMount {
    ClientMount {
        title: title.to_owned(),
        command: format!(
            "mount -t nfs -o {options},rsize={CLIENT_REQUEST_BYTES},wsize={CLIENT_REQUEST_BYTES},hard {target}"
        ),
        note: note.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transport_has_a_line_and_rails_have_one_each() {
        let addresses: Vec<IpAddr> = ["192.0.2.1", "10.0.0.1", "10.0.1.1"].iter().map(|a| a.parse().unwrap()).collect();
        let of_all = ExportService { v4: true, v3: true, v3_locks: true, rdma_port: Some(20049) };
        let v4 = ExportService { v3: false, ..of_all };
        let lines = client_mounts(Path::new("/mnt/d"), &addresses, &addresses[1..], of_all);
        let only = client_mounts(Path::new("/mnt/d"), &addresses, &addresses[1..], v4);
        assert!(only.len() == 4 && only.iter().all(|line| line.title.starts_with("NFSv4")), "{only:?}");
        let all: Vec<&str> = lines.iter().map(|l| l.command.as_str()).collect();
        assert_eq!(
            all[0],
            "mount -t nfs -o vers=4.2,proto=tcp,nconnect=8,rsize=1048576,wsize=1048576,hard 192.0.2.1:/mnt/d /mnt/spurline"
        );
        assert!(all[2].contains("proto=rdma,port=20049,") && all[2].contains(" 10.0.0.1:"), "{all:?}");
        assert!(all[4].contains("max_connect=2") && all[5].contains("10.0.1.1:/mnt/d /mnt/spurline-rail2"), "{all:?}");
        assert!(all[6].contains("remoteports=10.0.0.1~10.0.1.1"), "{all:?}");
        assert!(lines[1].note.is_empty());
        // The server's path stays, also if it is that of the example on clients.
        let same = client_mounts(Path::new("/mnt/spurline"), &addresses, &addresses[1..], v4);
        assert!(same[3].command.ends_with(" 10.0.1.1:/mnt/spurline /mnt/spurline-rail2"), "{}", same[3].command);
        let tcp = ExportService { v4: true, v3: true, v3_locks: false, rdma_port: None };
        let six = client_mounts(Path::new("/mnt/my d"), &["fd00::1".parse().unwrap()], &[], tcp);
        assert!(six[1].note.contains("ENOLCK") && six[0].note.is_empty());
        assert!(six[1].command.ends_with("'[fd00::1]:/mnt/my d' /mnt/spurline"), "{}", six[1].command);
        assert_eq!(six.len(), 2);
    }
}
