//! iperf3: a run between two network namespaces, and the JSON. Knows nothing of Spurline.

use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::machine;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// The figures measured by iperf3.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IperfFigures {
    /// Received bytes per second.
    pub bandwidth: f64,
    pub bytes: u64,
    /// Processor seconds of the sender.
    pub sender_cpu: f64,
    /// Processor seconds of the receiver.
    pub receiver_cpu: f64,
}

/// Starts a server in namespace `net`.
pub fn start_server(net: &str, addr: &str, log: &Path) -> Result<ServerProcess> {
    let iperf = child::require_program("iperf3", "iperf3")?;
    let mut command = child::command_in(&iperf, Some(net));
    command.args(["-s", "-B", addr, "-p", "5201", "--forceflush"]);
    let mut daemon = ServerProcess::start(command, "iperf3", log)?;
    crate::stop::wait_until("iperf3 to listen", Duration::from_secs(10), Duration::from_millis(10), || {
        daemon.check_alive()?;
        let text = std::fs::read_to_string(log).unwrap_or_default();
        Ok(text.contains("listening").then_some(()))
    })?;
    Ok(daemon)
}

/// Receives from the server over `streams` connections, with the congestion control of mounts and nodes.
pub fn receive(net: &str, addr: &str, streams: usize, runtime: Duration) -> Result<IperfFigures> {
    let more: &[&str] = if machine::paces_sends() { &["-l", "1M", "-C", "cubic"] } else { &["-l", "1M"] };
    run_client(net, addr, streams, true, runtime, more).map(|(measured, _)| measured)
}

/// Receives from the server or sends there, with additional arguments; also returns the client's processor seconds.
pub fn run_client(
    net: &str,
    addr: &str,
    streams: usize,
    receive: bool,
    runtime: Duration,
    more: &[&str],
) -> Result<(IperfFigures, f64)> {
    let iperf = child::require_program("iperf3", "iperf3")?;
    let mut command = child::command_in(&iperf, Some(net));
    let seconds = runtime.as_secs().max(1).to_string();
    command.args(["-c", addr, "-p", "5201", "-J", "-t", &seconds, "-P", &streams.to_string()]);
    command.args(receive.then_some("-R")).args(more);
    let done = child::run_to_end(command, runtime * 3 + Duration::from_secs(30))?;
    Ok((parse_output(&done.out)?, done.cpu))
}

/// Parses the JSON of an iperf3 client that received.
pub fn parse_output(text: &str) -> Result<IperfFigures> {
    let json: Value = serde_json::from_str(text).map_err(|e| BenchError::Failed(format!("iperf3: no JSON: {e}")))?;
    if let Some(error) = json["error"].as_str() {
        return Err(BenchError::Failed(format!("iperf3: {error}")));
    }
    let end = &json["end"];
    let received = &end["sum_received"];
    let number = |v: &Value| v.as_f64().ok_or_else(|| BenchError::Failed(format!("iperf3: no figures in {end}")));
    let seconds = number(&received["seconds"])?;
    let used = &end["cpu_utilization_percent"];
    // The client received, and so is the host, the sender the remote.
    Ok(IperfFigures {
        bandwidth: number(&received["bits_per_second"])? / 8.0,
        bytes: number(&received["bytes"])? as u64,
        sender_cpu: number(&used["remote_total"])? / 100.0 * seconds,
        receiver_cpu: number(&used["host_total"])? / 100.0 * seconds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_json_is_read() {
        let text = r#"{"start":{},"end":{"sum_sent":{"bytes":9},"sum_received":{"start":0,"seconds":2.0,
            "bytes":5000000000,"bits_per_second":20000000000.0},
            "cpu_utilization_percent":{"host_total":60.0,"host_user":1,"remote_total":40.0}}}"#;
        let got = parse_output(text).unwrap();
        assert_eq!(got, IperfFigures { bandwidth: 2.5e9, bytes: 5_000_000_000, sender_cpu: 0.8, receiver_cpu: 1.2 });
        assert!(parse_output(r#"{"error":"unable to connect"}"#).unwrap_err().to_string().contains("unable"));
        assert!(parse_output("{}").is_err());
        assert!(parse_output("").is_err());
    }
}
