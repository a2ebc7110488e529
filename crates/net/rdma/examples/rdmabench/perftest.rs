//! perftest and iperf3 as ceilings: a node's process runs their servers when it is asked to, so that the same command
//! measures on one machine and between two. It knows no transport of ours.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PORT: &str = "18600";

/// What is measured beside a transport.
#[derive(Debug, Clone, Copy)]
pub enum Bare {
    /// `ib_write_bw` with writes of a size, so many under way, for so many seconds.
    WriteBw(usize, usize, u64),
    /// `ib_write_lat` with writes of a size.
    WriteLat(usize),
    /// `ib_send_lat` with messages of a size.
    SendLat(usize),
    /// `iperf3` over so many connections for so many seconds.
    Iperf(usize, u64),
}

impl Bare {
    fn parse(line: &str) -> Option<Bare> {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        let mut number = || words.next()?.parse::<usize>().ok();
        Some(match name {
            "write_bw" => Bare::WriteBw(number()?, number()?, number()? as u64),
            "write_lat" => Bare::WriteLat(number()?),
            "send_lat" => Bare::SendLat(number()?),
            "iperf" => Bare::Iperf(number()?, number()? as u64),
            _ => return None,
        })
    }

    fn line(self) -> String {
        match self {
            Bare::WriteBw(size, depth, secs) => format!("write_bw {size} {depth} {secs}"),
            Bare::WriteLat(size) => format!("write_lat {size}"),
            Bare::SendLat(size) => format!("send_lat {size}"),
            Bare::Iperf(streams, secs) => format!("iperf {streams} {secs}"),
        }
    }

    /// One side's command: the server's, or that of a client of `to`.
    fn command(self, to: Option<IpAddr>) -> Command {
        let (program, words) = match self {
            Bare::WriteBw(size, depth, secs) => ("ib_write_bw", format!("-s {size} -t {depth} -D {secs} -F -R")),
            Bare::WriteLat(size) => ("ib_write_lat", format!("-s {size} -n 2000 -F -R")),
            Bare::SendLat(size) => ("ib_send_lat", format!("-s {size} -n 2000 -F -R")),
            Bare::Iperf(streams, secs) if to.is_some() => ("iperf3", format!("-P {streams} -t {secs} -J")),
            Bare::Iperf(..) => ("iperf3", "-s -1".to_owned()),
        };
        let mut command = Command::new(program);
        command.args(words.split(' ')).args(["-p", PORT]).stdin(Stdio::null()).stderr(Stdio::null());
        match (to, program) {
            (Some(ip), "iperf3") => command.args(["-c", &ip.to_string()]),
            (Some(ip), _) => command.arg(ip.to_string()),
            (None, _) => command.stdout(Stdio::null()),
        };
        command
    }

    /// Runs the client against the server that the node of `control` starts; gives messages per second, microseconds one
    /// way (the median, and on average), or for iperf3 bytes per second.
    pub fn measure(self, control: &mut Control, to: IpAddr) -> Option<[f64; 2]> {
        (control.ask(&self.line())? == "ok").then_some(())?;
        let out = self.command(Some(to)).output().ok();
        control.ask("end")?;
        let text = String::from_utf8_lossy(&out?.stdout).into_owned();
        if let Bare::Iperf(..) = self {
            // The last of them is the receiver's sum.
            let bits = text.rsplit("\"bits_per_second\":").next()?.split([',', '\n', '}']).next()?;
            return bits.trim().parse::<f64>().ok().map(|bits| [bits / 8.0; 2]);
        }
        let line = text.lines().rfind(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))?;
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match self {
            // #bytes #iterations BW-peak BW-average MsgRate[Mpps]; the average is in MiB/s.
            Bare::WriteBw(size, ..) => numbers.get(3).map(|mib| [mib * f64::from(1 << 20) / size as f64; 2]),
            // #bytes #iterations t_min t_max t_typical t_avg …
            _ => Some([*numbers.get(4)?, *numbers.get(5)?]),
        }
    }
}

/// A child that ends with this process's interest in it.
pub struct Kid(pub Child);

impl Drop for Kid {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The client's end of a conversation with the node's process, a line each way at a time.
pub struct Control(BufReader<TcpStream>);

impl Control {
    pub fn connect(to: SocketAddr) -> std::io::Result<Control> {
        Ok(Control(BufReader::new(TcpStream::connect(to)?)))
    }

    pub fn ask(&mut self, line: &str) -> Option<String> {
        writeln!(self.0.get_mut(), "{line}").ok()?;
        let mut answer = String::new();
        self.0.read_line(&mut answer).ok()?;
        Some(answer.trim().to_owned())
    }
}

/// Answers clients of `listener`, one after the other, for ever: `user` with this process's user time in seconds, a
/// measurement with its server running, `end` with its end.
pub fn answer(listener: &TcpListener, user: impl Fn() -> f64) {
    for stream in listener.incoming().flatten() {
        let mut stream = BufReader::new(stream);
        let (mut line, mut server) = (String::new(), None);
        while matches!(stream.read_line(&mut line), Ok(1..)) {
            let said = match (line.trim(), Bare::parse(&line)) {
                ("user", _) => user().to_string(),
                (_, Some(bare)) => {
                    server = bare.command(None).spawn().ok().map(Kid);
                    // It says nowhere when it listens.
                    std::thread::sleep(Duration::from_millis(700));
                    if server.is_some() { "ok" } else { "not installed" }.to_owned()
                }
                _ => {
                    drop(server.take());
                    "ok".to_owned()
                }
            };
            line.clear();
            if writeln!(stream.get_mut(), "{said}").is_err() {
                break;
            }
        }
    }
}
