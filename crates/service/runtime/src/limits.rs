//! The limit of open files and the allowed connections, and the right to exceed quotas.

use spurline_config::Fault;

/// Open files that a mount, a node or a coordinator needs at least, by use. The shares hold for any limit: [`connection_limits`]
/// uses half for connections, the store a quarter for cached files.
const NEEDED_FILES: u64 = CONNECTION_FILES + CACHED_FILES + OWN_FILES;
/// Connections: a few dozen per peer, over several paths.
const CONNECTION_FILES: u64 = 256;
/// Open files of the cache and the source.
const CACHED_FILES: u64 = 128;
/// Listeners, epoll sets, eventfds, control socket, logs, libraries.
const OWN_FILES: u64 = 128;

/// Raises the limit of open files to the hard limit: the usual soft limit of 1024 is meant for programs with select(2),
/// and too low for connections and cached files.
///
/// # Errors
/// When the hard limit is below the needed number: such a process would start, and then fail nearly every open.
pub fn raise_open_files() -> Result<(), Fault> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    check_open_files(maximum.unwrap_or(u64::MAX))?;
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::debug!("the limit of open files stays at {current:?}: {error}");
        check_open_files(current.unwrap_or(u64::MAX))?;
    }
    Ok(())
}

/// Gives up the right to exceed quotas and to use reserved blocks (`CAP_SYS_RESOURCE`). This process writes the bytes of all
/// users as root, and the kernel would not limit these. Threads inherit the right: to be called before the first thread.
pub fn obey_quotas() -> Result<(), Fault> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let given_up = capabilities(None).and_then(|mut sets| {
        for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
            set.remove(CapabilitySet::SYS_RESOURCE);
        }
        set_capabilities(None, sets)
    });
    given_up.map_err(|error| {
        Fault::missing(
            format!("this process can't give up the right to exceed quotas of its source: {error}"),
            "allow it capset(2), which a filter of system calls refuses",
        )
    })
}

fn check_open_files(limit: u64) -> Result<(), Fault> {
    if limit >= NEEDED_FILES {
        return Ok(());
    }
    Err(Fault::missing(
        format!("this process may have only {limit} open files; it needs at least {NEEDED_FILES}"),
        "raise the hard limit: in a root shell 'ulimit -n 65536', for a user '* - nofile 1048576' in \
         /etc/security/limits.d/90-nofile.conf, in a systemd unit LimitNOFILE=1048576",
    ))
}

/// The most TCP connections of a node, if enough files may be open.
const MAX_TCP_CONNECTIONS: usize = 65_536;

/// A node's limits of TCP and RDMA connections, and the remedy for more over TCP. TCP has half of the open files and
/// RDMA an eighth, as cached files take a quarter.
pub(crate) fn connection_limits() -> (usize, usize, String) {
    use rustix::process::{Resource, getrlimit};
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX);
    let tcp = (files / 2).clamp(16, MAX_TCP_CONNECTIONS);
    let fewer = "lower --nconnect of the mounts";
    let more = if tcp == MAX_TCP_CONNECTIONS {
        fewer.to_owned()
    } else {
        format!(
            "half of the {files} files that this process may have open are for connections: raise that (LimitNOFILE= in the \
             unit, ulimit -Hn), or {fewer}"
        )
    };
    (tcp, (files / 8).max(16), more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_open_files_are_refused_with_the_number() {
        let fault = check_open_files(64).unwrap_err();
        assert!(fault.what.contains("only 64") && fault.what.contains("512") && fault.remedy.contains("ulimit -n"));
        assert!(check_open_files(NEEDED_FILES).is_ok());
    }
}
