//! Real etcd servers on free ports of loopback, killed when dropped.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// An etcd server with data in a directory.
pub struct EtcdServer {
    child: Child,
    port: u16,
}

fn free_port() -> io::Result<u16> {
    TcpListener::bind("127.0.0.1:0")?.local_addr().map(|at| at.port())
}

impl EtcdServer {
    /// Whether etcd is installed; prints SKIP otherwise.
    ///
    /// # Panics
    /// When etcd is required.
    pub fn is_installed() -> bool {
        let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
        if !found {
            crate::skip("etcd", "etcd is not installed (package etcd-server)");
        }
        found
    }

    /// Starts a server at `port` (0: any) with the additional arguments `more`, and waits for the listener.
    ///
    /// # Errors
    /// When the server does not listen within two minutes.
    pub fn start(dir: &Path, port: u16, scheme: &str, more: &[&str]) -> io::Result<EtcdServer> {
        let begun = Instant::now();
        loop {
            let at = if port == 0 { free_port()? } else { port };
            let peers = free_port()?;
            let url = format!("{scheme}://127.0.0.1:{at}");
            let peer = format!("http://127.0.0.1:{peers}");
            let mut command = Command::new("etcd");
            command.arg("--data-dir").arg(dir).args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
            command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            command.arg("--initial-cluster").arg(format!("default={peer}")).args(more);
            let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            let mut server = EtcdServer { child, port: at };
            // Another process may have taken a port in between: then etcd exits, and other ports are tried.
            while server.child.try_wait()?.is_none() {
                if TcpStream::connect(("127.0.0.1", at)).is_ok() {
                    return Ok(server);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            if begun.elapsed() > Duration::from_secs(120) {
                return Err(io::Error::other("etcd does not start"));
            }
        }
    }

    /// Stops the process: connections are accepted, and nothing is answered.
    pub fn hang(&self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            // The process id is valid: the child has not been waited for.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::STOP);
        }
    }

    /// The listening port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The registry URL.
    pub fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        // A server that has exited must still be waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
