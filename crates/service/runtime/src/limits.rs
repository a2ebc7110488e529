//! How many files this process may have open, and how many connections follow from that.

/// Takes as many open files as this process may have: the usual limit of 1024 is there for programs that use select(2), and
/// is few for connections and cached files.
pub fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::debug!("the limit of open files stays at {current:?}: {error}");
    }
}

/// The most connections of a node over TCP, where it may have files enough open.
const CONNECTIONS: usize = 65_536;

/// How many connections a node takes over TCP and over RDMA, as far as open files go: half of those it may have and an
/// eighth, as cached files take a quarter; and how there would be more over TCP.
pub(crate) fn connection_limits() -> (usize, usize, String) {
    use rustix::process::{Resource, getrlimit};
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
    let tcp = (files / 2).clamp(16, CONNECTIONS);
    let fewer = "lower --nconnect of the mounts";
    let more = if tcp == CONNECTIONS {
        fewer.to_owned()
    } else {
        format!(
            "half of the {files} files that this process may have open are for connections: raise that (LimitNOFILE= in the \
             unit, ulimit -Hn), or {fewer}"
        )
    };
    (tcp, (files / 8).max(16), more)
}
