//! fio servers on hosts: started over ssh for a run, or found running. Knows no job.

use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::stop;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The port of a fio server, unless another is given.
pub const AGENT_PORT: u16 = 8765;
/// Longest wait for a server over ssh.
const AGENT_START_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait for a connection to a running server.
const AGENT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A host with a fio server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentHost {
    /// Name or address, as given by the user.
    pub host: String,
    pub port: u16,
}

impl AgentHost {
    /// Parses `HOST` or `HOST:PORT`.
    /// `Usage` for any other text.
    pub fn parse(text: &str) -> Result<AgentHost> {
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port.parse().map_err(|_| no_host_error(text))?),
            // A server of this run: a server that ends at this moment may still hold the usual port.
            None if is_own_name(text) => (text, child::free_port().unwrap_or(AGENT_PORT)),
            None => (text, AGENT_PORT),
        };
        // A name that begins with a dash would be an option of ssh.
        if host.is_empty() || host.starts_with('-') || host.contains(is_odd_character) {
            return Err(no_host_error(text));
        }
        Ok(AgentHost { host: host.to_owned(), port })
    }

    /// The form for fio's `--client`.
    pub fn client_word(&self) -> String {
        format!("--client={},{}", self.host, self.port)
    }

    /// Checks that something listens.
    /// `Missing`, with the ways to start a server.
    pub fn check_listens(&self) -> Result<()> {
        let missing = |why: String| {
            BenchError::Missing(format!(
                "no fio server answers at {}:{}: {why}; start one there (fio --server), or give --ssh",
                self.host, self.port
            ))
        };
        let addresses = (self.host.as_str(), self.port).to_socket_addrs().map_err(|e| missing(e.to_string()))?;
        let mut last = "the name has no address".to_owned();
        for address in addresses {
            match TcpStream::connect_timeout(&address, AGENT_CONNECT_TIMEOUT) {
                Ok(_) => return Ok(()),
                Err(e) => last = e.to_string(),
            }
        }
        Err(missing(last))
    }

    /// A command on this host over ssh. `-tt`: when the connection ends, the remote process is hung up too.
    /// `Missing` without ssh.
    pub fn ssh_command(&self, words: &[&str]) -> Result<Command> {
        self.over_ssh("-tt", words)
    }

    /// A command on this host over ssh, whose standard input and output are this process's pipes.
    /// `Missing` without ssh.
    pub fn piped_command(&self, words: &[&str]) -> Result<Command> {
        self.over_ssh("-T", words)
    }

    fn over_ssh(&self, terminal: &str, words: &[&str]) -> Result<Command> {
        let mut command = Command::new(child::require_program("ssh", "openssh-client")?);
        command.args([terminal, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", &self.host]).args(words);
        Ok(command)
    }

    /// Whether this is the local machine, by a name that always is.
    pub fn is_here(&self) -> bool {
        is_own_name(&self.host)
    }

    /// Starts a server on this machine, and waits for the listener.
    /// `Missing` without fio.
    pub fn start_here(&self, logs: &Path) -> Result<ServerProcess> {
        let mut command = Command::new(child::require_program("fio", "fio")?);
        command.arg(format!("--server=127.0.0.1,{}", self.port)).current_dir("/");
        let log = logs.join(format!("agent-{}.log", self.port));
        let mut process = ServerProcess::start(command, "fio --server", &log)?;
        stop::wait_until("fio --server to listen", AGENT_START_TIMEOUT, Duration::from_millis(50), || {
            process.check_alive()?;
            Ok(self.check_listens().ok())
        })?;
        Ok(process)
    }

    /// Starts a server over ssh, and waits for the listener.
    /// `Missing` without ssh or fio, with what ssh said.
    pub fn start_over_ssh(&self, logs: &Path) -> Result<ServerProcess> {
        let log = logs.join(format!("agent-{}-{}.log", self.host, self.port));
        let server = format!("--server=,{}", self.port);
        let command = self.ssh_command(&["exec", "fio", &server])?;
        let mut process = ServerProcess::start(command, &format!("fio on {}", self.host), &log)?;
        stop::wait_until(
            &format!("fio on {} to listen", self.host),
            AGENT_START_TIMEOUT,
            Duration::from_millis(50),
            || {
                process.check_alive().map_err(|e| BenchError::Missing(format!("{e}; is fio installed there?")))?;
                Ok(self.check_listens().ok())
            },
        )?;
        Ok(process)
    }
}

fn is_odd_character(c: char) -> bool {
    c.is_whitespace() || matches!(c, ',' | '/' | ':')
}

fn is_own_name(host: &str) -> bool {
    matches!(host, "localhost" | "127.0.0.1")
}

fn no_host_error(text: &str) -> BenchError {
    BenchError::Usage(format!("--hosts: '{text}' is no host: give HOST or HOST:PORT, with commas between"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read() {
        let host = |text| AgentHost::parse(text).map(|agent| (agent.host, agent.port));
        assert_eq!(host("node1").unwrap(), ("node1".into(), AGENT_PORT));
        assert_eq!(host("10.0.0.1:99").unwrap(), ("10.0.0.1".into(), 99));
        assert_eq!(host("localhost:99").unwrap(), ("localhost".into(), 99));
        assert_ne!(host("localhost").unwrap().1, AGENT_PORT);
        for wrong in ["", "a:b", ":1", "-oProxyCommand=x", "a b", "a/b", "a:1:2"] {
            assert!(host(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_host_without_a_server_says_how_to_start_one() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = AgentHost { host: "127.0.0.1".into(), port }.check_listens().unwrap_err();
        assert!(matches!(&error, BenchError::Missing(why) if why.contains("fio --server") && why.contains("--ssh")));
    }
}
