//! The agents of a run, a process on each host, here or over ssh: orders, answers, and the end. Knows no figures.

use super::agent::AgentOrder;
use crate::child::ServerProcess;
use crate::error::{BenchError, Result};
use crate::fleet::AgentHost;
use crate::stop;
use crate::workplace::{Workplace, own_program};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest wait of an interrupted run for an agent to remove files.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest time without a line from an agent that works; progress comes four times in a second.
const AGENT_SILENCE_LIMIT: Duration = Duration::from_secs(600);

/// All agents, ended when dropped.
pub struct AgentCrew {
    agents: Vec<Agent>,
}

struct Agent {
    host: String,
    process: ServerProcess,
}

enum AgentLine {
    Progress(u64),
    Done(Value),
}

impl AgentCrew {
    /// Starts an agent on each host, or an agent here where no host is named.
    /// `Missing` without ssh; a host that does not answer shows with the first order.
    pub fn start(place: &Workplace, hosts: &[AgentHost]) -> Result<AgentCrew> {
        let mut crew = AgentCrew { agents: Vec::new() };
        if hosts.is_empty() {
            let mut command = Command::new(own_program()?);
            command.arg("agent");
            crew.add("this host", command, place)?;
        }
        for host in hosts {
            let command = host.piped_command(&["spurline", "bench", "agent"])?;
            crew.add(&host.host, command, place)?;
        }
        Ok(crew)
    }

    fn add(&mut self, host: &str, command: Command, place: &Workplace) -> Result<()> {
        let log = place.log(&format!("agent-{}", self.agents.len()))?;
        let process = ServerProcess::start_piped(command, &format!("the agent on {host}"), &log)?;
        self.agents.push(Agent { host: host.to_owned(), process });
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.agents.len()
    }

    pub fn hosts(&self) -> Vec<String> {
        self.agents.iter().map(|agent| agent.host.clone()).collect()
    }

    /// Sends an order to each agent, then waits for all answers. `progress` gets the bytes of all agents so far.
    pub fn order_all<T: DeserializeOwned>(
        &mut self,
        order: impl Fn(usize) -> AgentOrder,
        mut progress: impl FnMut(u64),
    ) -> Result<Vec<T>> {
        for (index, agent) in self.agents.iter_mut().enumerate() {
            agent.send(&order(index))?;
        }
        let mut bytes = vec![0; self.agents.len()];
        let mut done: Vec<Option<Value>> = vec![None; self.agents.len()];
        let mut heard = Instant::now();
        while let Some(waiting) = done.iter().position(Option::is_none) {
            stop::check_stop()?;
            let mut silent = true;
            for (index, agent) in self.agents.iter_mut().enumerate() {
                match if done[index].is_none() { agent.next_line()? } else { None } {
                    Some(AgentLine::Progress(now)) => bytes[index] = now,
                    Some(AgentLine::Done(value)) => done[index] = Some(value),
                    None => continue,
                }
                silent = false;
            }
            if !silent {
                heard = Instant::now();
            } else if heard.elapsed() > AGENT_SILENCE_LIMIT {
                let host = &self.agents[waiting].host;
                let seconds = AGENT_SILENCE_LIMIT.as_secs();
                return Err(BenchError::Failed(format!("no answer from {host} for {seconds} s")));
            } else {
                progress(bytes.iter().sum());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        done.into_iter().flatten().map(parse_answer).collect()
    }
}

fn parse_answer<T: DeserializeOwned>(answer: Value) -> Result<T> {
    serde_json::from_value(answer).map_err(|e| {
        BenchError::Failed(format!("an agent's answer is not understood ({e}): install the same build everywhere"))
    })
}

impl Drop for AgentCrew {
    fn drop(&mut self) {
        // An agent removes the files at the end of the input.
        for agent in &mut self.agents {
            if !agent.process.end_input(CLEANUP_TIMEOUT) {
                anstream::eprintln!("the agent on {} does not end: its files may be left behind", agent.host);
            }
        }
    }
}

impl Agent {
    fn send(&mut self, order: &AgentOrder) -> Result<()> {
        let line =
            serde_json::to_string(order).map_err(|e| BenchError::Failed(format!("an order can't be made: {e}")))?;
        self.process.send_line(&line).map_err(why_gone)
    }

    fn next_line(&mut self) -> Result<Option<AgentLine>> {
        let host = &self.host;
        let Some(line) = self.process.next_line().map_err(why_gone)? else { return Ok(None) };
        let read: Value = serde_json::from_str(&line).map_err(|_| {
            BenchError::Missing(format!("{host} printed '{line}' instead of an answer: is spurline installed there?"))
        })?;
        if let Some(bytes) = read["progress"].as_u64() {
            return Ok(Some(AgentLine::Progress(bytes)));
        }
        let place = if host == "this host" { String::new() } else { format!("{host}: ") };
        match (read["missing"].as_str(), read["failed"].as_str()) {
            (Some(why), _) => Err(BenchError::Missing(format!("{place}{why}"))),
            (None, Some(why)) => Err(BenchError::Failed(format!("{place}{why}"))),
            (None, None) => Ok(Some(AgentLine::Done(read["done"].clone()))),
        }
    }
}

/// An agent that has ended: the host may lack the program.
fn why_gone(error: BenchError) -> BenchError {
    BenchError::Missing(format!("{error}; an agent is 'spurline bench agent' of the same build"))
}
