"""The cheapest cluster and plan that meet a target, of node types that have a price: clusters by price, those that cannot meet
it left out by proof, the others planned for."""
