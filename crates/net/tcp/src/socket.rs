//! What is set on every socket, the same on both sides and in the bare reader. It knows no frames.

use rustix::net::sockopt;
use spurline_types::Congestion;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Once;
use std::time::Duration;

/// Options of a data socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketOptions {
    /// Bytes the kernel may hold for sending; `None` leaves it to the kernel, which grows it as needed.
    pub send_buffer: Option<usize>,
    /// The same for receiving.
    pub recv_buffer: Option<usize>,
    /// A connection with nothing to say is asked for a sign of life after this, and dropped after three more.
    pub keepalive: Duration,
    /// Sent bytes that stay without acknowledgement for this long end the connection.
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
    /// Sets what has to be there before the connection is: on a socket to be connected, and on a listener, whose
    /// accepted sockets inherit it. A connection that began with BBR goes on pacing after it was given another.
    ///
    /// # Errors
    /// When the kernel refuses one.
    pub fn prepare(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        control_congestion(fd, self.congestion)?;
        if let Some(bytes) = self.send_buffer {
            sockopt::set_socket_send_buffer_size(fd, bytes)?;
        }
        if let Some(bytes) = self.recv_buffer {
            sockopt::set_socket_recv_buffer_size(fd, bytes)?;
        }
        Ok(())
    }

    /// Sets the rest on a socket, before it is connected or after it was accepted.
    ///
    /// # Errors
    /// When the kernel refuses one.
    pub fn apply(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
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

/// Chooses the congestion control. Said once in each process when it is not the host's own.
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
        options.prepare(listener.as_fd()).unwrap();
        let reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        options.prepare(reader.as_fd()).unwrap();
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
        let named = |congestion| SocketOptions { congestion, ..SocketOptions::default() }.prepare(listener.as_fd());
        named(Congestion::Reno).unwrap();
        assert_eq!(sockopt::tcp_congestion(&listener).unwrap(), "reno");
        if let Err(e) = named(Congestion::Dctcp) {
            assert!(e.to_string().contains("tcp_available_congestion_control"), "{e}");
        }
    }
}
