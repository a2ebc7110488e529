//! The options of every socket, equal on both sides and in the bare reader. Knows no frames.

use rustix::net::sockopt;
use spurline_types::Congestion;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Once;
use std::time::Duration;

/// Options of a data socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketOptions {
    /// Bytes the kernel may buffer for sending; `None` leaves the size to the kernel, which grows the buffer as needed.
    pub send_buffer: Option<usize>,
    /// The same for receiving.
    pub recv_buffer: Option<usize>,
    /// An idle connection sends a keepalive probe after this time, and ends after three unanswered probes.
    pub keepalive: Duration,
    /// Sent bytes that stay unacknowledged for this long end the connection.
    pub user_timeout: Duration,
    /// The congestion control.
    pub congestion: Congestion,
}

impl Default for SocketOptions {
    fn default() -> Self {
        SocketOptions {
            send_buffer: None,
            recv_buffer: None,
            keepalive: Duration::from_secs(15),
            user_timeout: Duration::from_secs(30),
            congestion: Congestion::Auto,
        }
    }
}

impl SocketOptions {
    /// Sets the options that must precede the connection: on a socket before connecting, and on a listener, whose accepted
    /// sockets inherit the options. A connection that began with BBR keeps pacing even after a change.
    ///
    /// # Errors
    /// When the kernel refuses an option.
    pub fn apply_before_connect(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        control_congestion(fd, self.congestion)?;
        if let Some(bytes) = self.send_buffer {
            sockopt::set_socket_send_buffer_size(fd, bytes)?;
        }
        if let Some(bytes) = self.recv_buffer {
            sockopt::set_socket_recv_buffer_size(fd, bytes)?;
        }
        Ok(())
    }

    /// Sets the other options on a socket, before connecting or after accepting.
    ///
    /// # Errors
    /// When the kernel refuses an option.
    pub fn apply_options(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        sockopt::set_tcp_nodelay(fd, true)?;
        sockopt::set_socket_keepalive(fd, true)?;
        let idle = self.keepalive.max(Duration::from_secs(1));
        sockopt::set_tcp_keepidle(fd, idle)?;
        sockopt::set_tcp_keepintvl(fd, Duration::from_secs((idle.as_secs() / 3).max(1)))?;
        sockopt::set_tcp_keepcnt(fd, 3)?;
        sockopt::set_tcp_user_timeout(fd, u32::try_from(self.user_timeout.as_millis()).unwrap_or(u32::MAX))?;
        Ok(())
    }
}

/// Sets the congestion control. Logged once per process when different from the host's.
fn control_congestion(fd: BorrowedFd<'_>, choice: Congestion) -> io::Result<()> {
    static SAID: Once = Once::new();
    match choice {
        Congestion::System => Ok(()),
        Congestion::Auto => {
            let system = sockopt::tcp_congestion(fd)?;
            if !system.starts_with("bbr") {
                return Ok(());
            }
            let instead = ["cubic", "reno"].into_iter().find(|name| sockopt::set_tcp_congestion(fd, name).is_ok());
            SAID.call_once(|| match instead {
                Some(name) => tracing::info!(
                    "TCP: {name} instead of this host's {system}, which paces short answers on a fast network; \
                     --tcp-congestion system keeps it"
                ),
                None => tracing::warn!(
                    "TCP: this host's {system} paces short answers on a fast network, and neither cubic nor reno may be \
                     used instead; see net.ipv4.tcp_allowed_congestion_control"
                ),
            });
            Ok(())
        }
        name => sockopt::set_tcp_congestion(fd, name.name()).map_err(|e| {
            let why = format!(
                "--tcp-congestion {name}: {e}; see net.ipv4.tcp_available_congestion_control and \
                 net.ipv4.tcp_allowed_congestion_control"
            );
            io::Error::new(io::Error::from(e).kind(), why)
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    #[test]
    fn neither_end_of_a_connection_paces() {
        let options = SocketOptions::default();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        options.apply_before_connect(listener.as_fd()).unwrap();
        let reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        options.apply_before_connect(reader.as_fd()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for end in [reader.as_fd(), accepted.as_fd()] {
            let used = sockopt::tcp_congestion(end).unwrap();
            assert!(!used.starts_with("bbr"), "{used}");
        }
        let accepted = sockopt::tcp_congestion(&accepted).unwrap();
        assert_eq!(accepted, sockopt::tcp_congestion(&listener).unwrap(), "inherited, not set later");
    }

    #[test]
    fn an_algorithm_can_be_named_and_one_that_is_missing_is_an_error_with_a_remedy() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let named = |congestion| {
            SocketOptions { congestion, ..SocketOptions::default() }.apply_before_connect(listener.as_fd())
        };
        named(Congestion::Reno).unwrap();
        assert_eq!(sockopt::tcp_congestion(&listener).unwrap(), "reno");
        if let Err(e) = named(Congestion::Dctcp) {
            assert!(e.to_string().contains("tcp_available_congestion_control"), "{e}");
        }
    }
}
