//! The suite of every transport, on the simulated one.

use spurline_net_sim::{After, FaultPlan, Rates, SimNode, SimRail};
use spurline_transport::conformance::{End, Peer, Rig, Script, run};
use spurline_transport::{Connector, Service, TransportKind};
use std::sync::Arc;

/// The simulated transport, its channels over a simulated rail or not.
struct Sim(Option<SimRail>);

/// A node, over a rail or not.
struct Node(SimNode, Option<SimRail>);

impl Peer for Node {
    fn connector(&self) -> Arc<dyn Connector> {
        match &self.1 {
            None => self.0.connector(),
            Some(rail) => rail.connector(self.0.connector(), TransportKind::Rdma),
        }
    }
    fn kill(&mut self) {
        self.0.kill();
    }
}

impl Rig for Sim {
    fn serve(&self, service: Arc<dyn Service>) -> Box<dyn Peer> {
        Box::new(Node(SimNode::new("sim", service, Arc::new(FaultPlan::new(7, Rates::default()))), self.0.clone()))
    }
    fn play(&self, script: Script) -> Box<dyn Peer> {
        let play = move |header: &_| {
            let (bytes, end) = script(header);
            let after = match end {
                End::Continue => After::Continue,
                End::Close => After::Close,
                End::Stall => After::Stall,
            };
            (bytes, after)
        };
        Box::new(Node(SimNode::playing("sim", play, Arc::new(FaultPlan::new(7, Rates::default()))), self.0.clone()))
    }
}

#[test]
fn conforms() {
    run(&Sim(None));
}

#[test]
fn conforms_over_a_rail() {
    let rail = SimRail::new();
    run(&Sim(Some(rail.clone())));
    assert_eq!(rail.channels(), 0, "a channel outlived its owner");
}
