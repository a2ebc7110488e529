//! The counters of the kernel's NFS client and server, for all mounts and exports of this host together.

use serde_json::{Value, json};
use std::path::Path;

/// The counters of the client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NfsClientCounters {
    /// Calls to servers.
    pub calls: u64,
    /// Calls that were sent once more.
    pub sent_again: u64,
}

/// The counters of the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NfsServerCounters {
    /// Calls of clients.
    pub calls: u64,
    /// Calls that were malformed or not permitted.
    pub refused: u64,
    /// TCP connections that clients have made.
    pub tcp_connections: u64,
    /// Bytes read by clients.
    pub read_bytes: u64,
    /// Bytes written by clients.
    pub write_bytes: u64,
}

/// The numbers of a line that begins with `name`.
fn numbers(text: &str, name: &str) -> Vec<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or("").split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

impl NfsClientCounters {
    /// Reads the counters below `root`; zero where no client has run.
    pub fn read(root: &Path) -> NfsClientCounters {
        let text = std::fs::read_to_string(root.join("proc/net/rpc/nfs")).unwrap_or_default();
        match numbers(&text, "rpc")[..] {
            [calls, sent_again, ..] => NfsClientCounters { calls, sent_again },
            _ => NfsClientCounters::default(),
        }
    }

    /// As JSON.
    pub fn to_json(self) -> Value {
        json!({ "calls": self.calls, "sent_again": self.sent_again })
    }
}

impl NfsServerCounters {
    /// Reads the counters below `root`; zero where no server has run.
    pub fn read(root: &Path) -> NfsServerCounters {
        let text = std::fs::read_to_string(root.join("proc/net/rpc/nfsd")).unwrap_or_default();
        NfsServerCounters {
            calls: number_at(&text, "rpc", 0),
            refused: number_at(&text, "rpc", 1),
            tcp_connections: number_at(&text, "net", 3),
            read_bytes: number_at(&text, "io", 0),
            write_bytes: number_at(&text, "io", 1),
        }
    }

    /// As JSON.
    pub fn to_json(self) -> Value {
        json!({
            "calls": self.calls,
            "refused": self.refused,
            "tcp_connections": self.tcp_connections,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
        })
    }
}

fn number_at(text: &str, name: &str, n: usize) -> u64 {
    numbers(text, name).get(n).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_the_client_and_of_the_server() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(NfsClientCounters::read(root.path()), NfsClientCounters::default());
        std::fs::create_dir_all(root.path().join("proc/net/rpc")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(root.path().join("proc/net/rpc").join(name), text).unwrap();
        // As Linux 6.1 shows them.
        write(
            "nfs",
            "net 0 0 0 0\nrpc 174 0 174\nproc3 22 1 4 0 2 4 0 2 0 0 0 0 0 0 0 0 0 0 0 0 4 2 0\n\
             proc4 69 6 4 0 0 4 0 2 0 6 0 18 0 0 0 0 0 0 10 12 12 6 0 0 0 0 0 12 0 0 0 30 0 0 0 0 0 0 0 9 4 3 2 0 4 0 0 0 0 6 \
             0 0 0 0 3 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
        );
        write(
            "nfsd",
            "rc 0 0 176\nfh 0 0 0 0 0\nio 12 0\nth 8 0 0.000 0.000 0.000 0.000 0.000 0.000 0.000 0.000 0.000 0.000\n\
             ra 0 0 0 0 0 0 0 0 0 0 0 0\nnet 176 0 97 8\nrpc 176 0 0 0 0\n\
             proc3 22 3 4 0 2 4 0 2 0 0 0 0 0 0 0 0 0 0 0 0 4 2 0\nproc4 2 6 147\n",
        );
        assert_eq!(NfsClientCounters::read(root.path()), NfsClientCounters { calls: 174, sent_again: 0 });
        let wanted = NfsServerCounters { calls: 176, refused: 0, tcp_connections: 8, read_bytes: 12, write_bytes: 0 };
        assert_eq!(NfsServerCounters::read(root.path()), wanted);
    }
}
